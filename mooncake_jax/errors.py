"""The one error a user can cause: bad input, told in a single line."""


class UsageError(Exception):
    """Bad input: names the file, field or flag, the value received, and the remedy.

    The command line prints it as one line and exits with code 2.
    """
