"""Command-line programs: ``python -m tools.<name> --help`` in a checkout describes each.

Installed, this is the package ``dapple_tf.tools``, and some are console commands: see `command.CONSOLE`. Imports use
that name in a checkout, too, where ``dapple_tf/tools`` has this folder as its path.
"""
