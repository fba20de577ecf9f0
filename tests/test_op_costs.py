"""Costs of operators: averages of what was measured, rooflines for the rest, and their files."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from dapple_tf.operators.op_costs import OperatorCosts, OperatorCostsError, device_kind
from dapple_tf.operators.rooflines import CPU, P100, Roofline
from dapple_tf.operators.signatures import OpSignature

_RELU = OpSignature.parse("Relu | float32[64,8] | float32[64,8]")
_WIDE = OpSignature.parse("Relu | float32[64,800000] | float32[64,800000]")
_TANH = OpSignature.parse("Tanh | float32[64,800000] | float32[64,800000]")
_PLAIN = Roofline(flops=1e12, bandwidth=1e11, launch=1e-5, memory=0.5)

# FD-DPS, table 6: milliseconds in VGG-16, a batch of 64 images of 224 x 224, on a Tesla P100.
_STRIDES = "data_format=NHWC dilations=1:1:1:1 padding=SAME strides=1:1:1:1"
_WINDOW = "data_format=NHWC ksize=1:2:2:1 padding=VALID strides=1:2:2:1"
_BIG, _FILTER = "float32[64,224,224,64]", "float32[3,3,64,64]"
_TABLE_6 = {
    "Conv1_1": (2.146, [f"Conv2D {_STRIDES} | float32[64,224,224,3],float32[3,3,3,64] | {_BIG}"]),
    "Conv1_2": (15.673, [f"Conv2D {_STRIDES} | {_BIG},{_FILTER} | {_BIG}"]),
    "Conv1_2bp": (
        36.466,
        [
            f"Conv2DBackpropInput {_STRIDES} | int32[4],{_FILTER},{_BIG} | {_BIG}",
            f"Conv2DBackpropFilter {_STRIDES} | {_BIG},int32[4],{_BIG} | {_FILTER}",
        ],
    ),
    "Relu1_2": (2.908, [f"Relu | {_BIG} | {_BIG}"]),
    "Pool1": (0.96, [f"MaxPool {_WINDOW} | {_BIG} | float32[64,112,112,64]"]),
    "Fc6": (
        1.654,
        ["MatMul transpose_a=false transpose_b=false | float32[64,25088],float32[25088,4096] | float32[64,4096]"],
    ),
}


@pytest.mark.parametrize("operator", _TABLE_6)
def test_p100_meets_the_papers_table_6(operator: str) -> None:
    paper, signatures = _TABLE_6[operator]
    costs = OperatorCosts.p100()
    here = 1e3 * sum(costs.seconds(OpSignature.parse(text), "GPU") for text in signatures)
    # At the whole bandwidth of 732 GB/s Pool1's 1.03 GB take 1.40 ms: the paper's time is below what the device can.
    assert here == pytest.approx(1.41 if operator == "Pool1" else paper, rel=0.01)


def test_means_are_iterative_averages() -> None:
    costs = OperatorCosts()
    for seconds in (1.0, 2.0, 6.0):
        costs.add(_RELU, "GPU", seconds)
    assert costs.measured(_RELU, "GPU") == (3, pytest.approx(3.0))
    costs.add(_RELU, "GPU", 7.0, times=3)
    assert costs.seconds(_RELU, "GPU") == pytest.approx(5.0)
    assert costs.measured(_RELU, "CPU") is None
    assert costs.count == 1


def test_others_measurements_are_taken_in_by_their_counts() -> None:
    one, other = OperatorCosts(), OperatorCosts()
    one.add(_RELU, "GPU", 1.0)
    other.add(_RELU, "GPU", 4.0, times=2)
    other.add(_WIDE, "CPU", 0.5)
    one.update(other)
    assert one.measured(_RELU, "GPU") == (3, pytest.approx(3.0))
    assert one.seconds(_WIDE, "CPU") == 0.5


@pytest.mark.parametrize(("seconds", "times"), [(-1.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0)])
def test_impossible_times_are_refused(seconds: float, times: int) -> None:
    with pytest.raises(OperatorCostsError, match="Relu was measured"):
        OperatorCosts().add(_RELU, "GPU", seconds, times=times)


def test_what_was_not_measured_is_estimated_by_the_roofline() -> None:
    costs = OperatorCosts({"GPU": _PLAIN})
    size = 2 * 4 * 64 * 800000
    assert costs.seconds(_WIDE, "GPU") == pytest.approx(1e-5 + size / 0.5e11)
    product = "MatMul transpose_a=false transpose_b=false | float32[1000,1000],float32[1000,1000] | float32[1000,1000]"
    assert costs.seconds(OpSignature.parse(product), "GPU") == pytest.approx(1e-5 + 2e9 / 1e12)
    assert costs.seconds(OpSignature.parse("Reshape | float32[4],int32[1] | float32[4]"), "GPU") == 0


def test_estimates_are_scaled_by_what_was_measured_of_the_same_op_type_else_of_all() -> None:
    costs = OperatorCosts({"GPU": _PLAIN, "CPU": _PLAIN})
    plain = costs.seconds(_WIDE, "GPU") - _PLAIN.launch
    half = OpSignature.parse("Relu | float32[32,800000] | float32[32,800000]")
    costs.add(half, "GPU", _PLAIN.launch + 3 * plain / 2)
    assert costs.seconds(_WIDE, "GPU") == pytest.approx(_PLAIN.launch + 3 * plain)
    assert costs.seconds(_TANH, "GPU") == pytest.approx(_PLAIN.launch + 3 * plain)
    for op, ratio in (("Sigmoid", 5), ("Exp", 7)):
        costs.add(half._replace(op=op), "GPU", _PLAIN.launch + ratio * plain / 2)
    assert costs.seconds(_WIDE, "GPU") == pytest.approx(_PLAIN.launch + 3 * plain)
    assert costs.seconds(_TANH, "GPU") == pytest.approx(_PLAIN.launch + 5 * plain)  # the median of 3, 5 and 7
    assert costs.seconds(_WIDE, "CPU") == pytest.approx(_PLAIN.launch + plain)


def test_small_operators_tell_what_starting_one_takes() -> None:
    costs = OperatorCosts({"GPU": _PLAIN})
    assert costs.launch_seconds("GPU") == _PLAIN.launch
    tiny = OpSignature.parse("Relu | float32[2,2] | float32[2,2]")
    plain = costs.seconds(_WIDE, "GPU") - _PLAIN.launch
    for op, seconds in (("Relu", 1e-6), ("Exp", 2e-6), ("Neg", 4e-6)):
        costs.add(tiny._replace(op=op), "GPU", seconds)
    assert costs.launch_seconds("GPU") == 2e-6
    assert costs.seconds(_WIDE, "GPU") == pytest.approx(1e-6 + plain)
    assert costs.seconds(_TANH, "GPU") == pytest.approx(2e-6 + plain)
    costs.add(OpSignature.parse("While functions=a | float32[2] | float32[2]"), "GPU", 1.0)  # tells nothing
    assert costs.seconds(_TANH, "GPU") == pytest.approx(2e-6 + plain)


def _work(signature: OpSignature):  # type: ignore[no-untyped-def]
    from dapple_tf.operators.flops import work

    return work(signature)


def test_kinds_of_devices() -> None:
    assert device_kind("/job:worker/replica:0/task:0/device:GPU:3") == "GPU"
    assert device_kind("cpu:0") == "CPU"
    with pytest.raises(ValueError, match="doesn't end in a kind"):
        device_kind("/job:worker")
    with pytest.raises(OperatorCostsError, match="nothing is known of devices of kind 'TPU'"):
        OperatorCosts().seconds(_RELU, "TPU")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops", 0.0),
        ("bandwidth", math.inf),
        ("launch", -1.0),
        ("compute", {"matmul": 0}),
        ("compute", {"mat": 1}),
        ("memory", "fast"),
        ("dtypes", 3),
    ],
)
def test_impossible_rooflines_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}|unknown kind of work 'mat'"):
        Roofline(**{"flops": 1e12, "bandwidth": 1e11, "launch": 0.0, field: value})  # type: ignore[arg-type]


def test_half_precision_is_faster() -> None:
    text = "MatMul transpose_a=false transpose_b=false | {0}[512,512],{0}[512,512] | {0}[512,512]"
    single, half = (OpSignature.parse(text.format(dtype)) for dtype in ("float32", "float16"))
    assert P100.seconds(_work(half)) < 0.6 * P100.seconds(_work(single))


def test_files_give_the_same_costs_back(tmp_path: pathlib.Path) -> None:
    costs = OperatorCosts({"GPU": P100, "CPU": CPU})
    costs.add(_RELU, "GPU", 0.25, times=4)
    costs.add(_WIDE._replace(inputs=()), "CPU", 0.5)
    path = tmp_path / "costs.json"
    costs.save(path)
    loaded = OperatorCosts.load(path)
    assert loaded.to_json() == costs.to_json()
    assert loaded.measured(_RELU, "GPU") == (4, 0.25)
    assert loaded.rooflines == {"GPU": P100, "CPU": CPU}
    assert loaded.kinds == ("GPU", "CPU")


def test_files_that_would_not_be_read_are_not_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapple_tf.operators.op_costs.MOST_BYTES", 1000)
    costs = OperatorCosts({})
    for size in range(100):
        costs.add(OpSignature.parse(f"Relu | float32[{size}] | float32[{size}]"), "GPU", 1.0)
    with pytest.raises(OperatorCostsError, match="the costs of 100 operators take"):
        costs.save(tmp_path / "costs.json")
    assert not (tmp_path / "costs.json").exists()
    assert OperatorCosts.from_json(costs.to_json()).to_json() == costs.to_json()


def _file(**changes: object) -> str:
    data = json.loads(OperatorCosts({"GPU": _PLAIN}).to_json())
    for key, value in changes.items():
        data["devices"]["GPU"][key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "a JSON list where an object"),
        ("{", "isn't JSON"),
        ('{"format": "x/1", "devices": {}}', "'format' is 'x/1'; this version reads 'dapple_tf.operator_costs/1'"),
        ('{"format": "dapple_tf.operator_costs/1"}', "key 'devices' is missing"),
        ('{"format": "dapple_tf.operator_costs/1", "devices": []}', r"'devices' is \[\]; it must be an object"),
        (_file(speed=3), "unknown key 'speed'"),
        (_file(roofline={"flops": 1}), "key 'bandwidth' is missing"),
        (_file(roofline={"flops": 1, "bandwidth": "x", "launch": 0}), "bandwidth is 'x'; it must be a finite number"),
        (_file(measured={"Relu": [1, 2.0]}), "'Relu' isn't an operator's signature"),
        (_file(measured={str(_RELU): [1]}), r"must be \[number of measurements, mean seconds\]"),
        (_file(measured={str(_RELU): [True, 1.0]}), r"must be \[number of measurements, mean seconds\]"),
        (_file(measured={str(_RELU): [1, -1.0]}), "at least 0 s"),
        (_file(measured={str(_RELU): [1, 10**400]}), "device kind 'GPU'"),
    ],
)
def test_malformed_files_are_refused(text: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OperatorCostsError, match=said) as error:
        OperatorCosts.load(path)
    assert str(path) in str(error.value)
