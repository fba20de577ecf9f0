"""Multi-region joint scheduling: one device's weight gradients on a second stream (Out-Of-Order BackProp, section 4).

No other package knows this one: it gains nothing where it could be measured (docs/joint.md). Importing it is what makes
its schedule known, by the name ``dapple_tf.joint:JOINT``.
"""

from dapple_tf.joint.stream_schedule import JOINT

__all__ = ["JOINT"]
