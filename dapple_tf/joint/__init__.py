"""Multi-region joint scheduling: one device's weight gradients on a second stream (Out-Of-Order BackProp, section 4).

Algorithm 1 and its simulation. No step runs so: on processors a second stream only cost time (docs/joint.md).
"""
