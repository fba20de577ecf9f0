"""What passes raise."""


class PassError(Exception):
    """A pass can't do what it was asked to; the text says what, where, and the fix."""
