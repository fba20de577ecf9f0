"""Static analysis of graphs: shapes, dependence on samples, how operators can be split."""
