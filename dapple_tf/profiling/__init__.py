"""What layers, operators, streams and whole steps cost, as it is measured on devices."""
