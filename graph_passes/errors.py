"""What passes raise."""


class PassError(Exception):
    """A pass can't do its work; the text has the reason, the place and the fix."""
