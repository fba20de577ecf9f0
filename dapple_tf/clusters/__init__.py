"""Devices and links, described or real; and the connection to the workers that lend them."""
