"""Programs of our own evaluation, in a checkout only: ``python -m tools.evaluation.<name> --help`` describes each.

Benchmarks (``bench_*``), checks of predictions against real training (``check_*``), the reproductions of both papers'
evaluations, models trained beside plain Keras, and the examples of documents. Their results are in docs/results.
"""
