"""What stands between a client and strangers: messages over TCP, and which addresses a server can be reached at."""
