"""What can be seen of a plan, a graph and a step: timelines and task graphs, as text, images, pages and traces."""
