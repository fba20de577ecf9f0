"""What layers cost, as it is measured on a device."""
