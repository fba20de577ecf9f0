"""Sessions on the devices of a cluster, and the connection to the workers that lend them."""
