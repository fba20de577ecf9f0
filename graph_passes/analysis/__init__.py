"""What can be told of a graph without running it: shapes, dependence on samples, how operators can be split."""
