"""The comparison with PyTorch's pipelines: its models, ways and tables, and once all of it in its smallest form."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from absl.testing import flagsaver

from dapple_tf.tools import command
from dapple_tf.tools.evaluation import bench_cluster, bench_torch, torch_report
from dapple_tf.tools.evaluation.bench_models import MODELS
from dapple_tf.tools.evaluation.bench_report import read_results
from dapple_tf.tools.evaluation.peers import Peers, PeersError
from dapple_tf.tools.evaluation.process_families import peak_mib, place
from dapple_tf.tools.evaluation.ratios import Quartiles
from dapple_tf.tools.evaluation.torch_ways import KINDS, Way, all_ways, best

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


# ---- models


@pytest.mark.parametrize("name", ["gpt:tiny", "bert:tiny", "resnet:tiny"])
def test_models_and_their_data_fit_each_other(name: str) -> None:
    described = MODELS[name]
    model, (x, y) = described.make(dtype="bfloat16"), described.batch(3)
    assert {tensor.name for tensor in model.inputs} == described.data(1)[0].keys()
    assert model.predict(x, verbose=0).shape[:-1] == y.shape
    assert model.dtype_policy.name == "mixed_bfloat16"
    assert described.make().dtype_policy.name == "float32"
    names = [layer.name for layer in model.layers]
    cuts = described.cuts(4)
    assert len(cuts) == 3 and [*sorted(cuts, key=names.index)] == cuts


def test_stages_have_equal_numbers_of_blocks() -> None:
    assert MODELS["gpt"].ranges(4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert MODELS["gpt"].cuts(2) == ["block_3"]
    assert MODELS["bert"].cuts(4) == ["layer_0", "layer_1", "layer_2"]
    assert MODELS["resnet"].ranges(4) == [(0, 2), (2, 5), (5, 8), (8, 10)]
    with pytest.raises(ValueError, match="8 blocks of the gpt don't make 9 stages"):
        MODELS["gpt"].ranges(9)


def test_the_flags_of_a_gpt_are_its_size() -> None:
    before = flagsaver.save_flag_values(bench_cluster.FLAGS)
    bench_cluster.FLAGS(["", "--model=gpt", "--blocks=2", "--width=8", "--sequence=4"])
    assert bench_cluster.bench_model().make().count_params() > 0
    assert bench_cluster.bench_model().cuts(2) == ["block_0"]
    bench_cluster.FLAGS(["", "--model=resnet"])
    assert bench_cluster.bench_model() is MODELS["resnet"]
    flagsaver.restore_flag_values(before, bench_cluster.FLAGS)


# ---- ways


def test_ways_have_names_and_kinds() -> None:
    ways = all_ways(["1f1b"], ["zb_v"], ["dapple_a"], xla=True)
    assert [(way.name, way.kind) for way in ways] == [
        ("torch_1f1b", "torch"),
        ("torch_1f1b_unpinned", "torch"),
        ("torch_zb_v_compiled", "torch_compiled"),
        ("torch_zb_v_compiled_unpinned", "torch_compiled"),
        ("ours_dapple_a", "ours"),
        ("ours_dapple_a_unpinned", "ours"),
        ("ours_dapple_a_xla", "ours_xla"),
        ("ours_dapple_a_xla_unpinned", "ours_xla"),
    ]
    assert [way.name for way in all_ways([], [], ["zb_v"], xla=False)] == ["ours_zb_v", "ours_zb_v_unpinned"]
    assert ways[1].shared == ways[0] == ways[0].shared


def test_ours_have_the_stages_of_pytorchs() -> None:
    model = MODELS["gpt"]
    assert Way(True, "zb_v").plan(model, 4, 8).devices == ((0,), (1,), (1,), (0,)) == _lists(Way(False, "zb_v"))
    assert Way(True, "interleaved").plan(model, 4, 8).devices == _lists(Way(False, "interleaved"))
    plan = Way(True, "dapple_a", compiled=True).plan(model, 4, 8)
    assert plan.devices == ((0,), (1,)) == _lists(Way(False, "1f1b"))
    assert plan.jit_compile and plan.cuts == ("block_3",)


def _lists(way: Way) -> tuple[tuple[int, ...], ...]:
    return tuple((device,) for device in way.devices)


def test_the_best_of_each_kind_has_the_least_median() -> None:
    """One slow turn doesn't cost a way its place, and kinds that weren't tried have no best one."""
    steady, slower, own = Way(False, "1f1b"), Way(False, "zb_v"), Way(True, "dapple_a")
    assert best({slower: [2.0, 2.0, 2.0], steady: [1.0, 1.0, 9.0], own: [3.0, 3.0, 3.0]}) == [steady, own]


def test_ways_that_train_otherwise_are_told() -> None:
    case = bench_torch.Case("gpt", "float32", 8, 16)
    losses = {Way(False, "1f1b"): [5.0, 4.0], Way(True, "zb_v"): [5.001, 4.001]}
    bench_torch.check_alike(losses, case)
    losses[Way(True, "dapple_a")] = [5.0, 4.1]
    with pytest.raises(PeersError, match=r"torch_1f1b and ours_dapple_a don't train the gpt alike: .*4\.1\]"):
        bench_torch.check_alike(losses, case)


def test_the_rank_of_the_last_stage_tells_the_loss() -> None:
    program = "import sys\nfor line in sys.stdin: print(sys.argv[1], flush=True)"
    answers = ['{"loss": null}', '{"loss": 2.5}']
    with contextlib.ExitStack() as stack:
        peers = Peers(stack, [[sys.executable, "-c", program, answer] for answer in answers])
        cores = os.sched_getaffinity(0)
        for pinned in (True, False):
            run = bench_torch.Run(peers, peers.processes, pinned=pinned)
            run(1)
            assert run.loss == 2.5
            placed = [os.sched_getaffinity(process) for process in peers.processes]
            assert all(len(own) == 1 for own in placed) if pinned else placed == [cores, cores]


def test_all_threads_of_a_process_are_placed() -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        "import sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(threading.active_count(), flush=True)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        place(process.pid, [core])
        threads = [int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) == 2 and {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({core})
        }
        process.communicate()


@pytest.mark.slow
def test_the_strategys_compiled_step_is_that_of_keras() -> None:
    """XLA doesn't convert the all-reduce of an update under the strategy, so that a step of Keras fails there."""
    x, y = MODELS["gpt:tiny"].batch(4)
    plain, compiled = MODELS["gpt:tiny"].make(), MODELS["gpt:tiny"].make()
    step = bench_cluster.compiled_step(compiled)
    for _ in range(2):
        plain.train_on_batch(x, y)
        step((x, y))
    for one, other in zip(plain.get_weights(), compiled.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)
    assert float(compiled.metrics[0].result()) > 0


def test_the_pass_of_the_example_compresses_gradients() -> None:
    assert bench_cluster.compress_gradients().name == "compress_gradients"


# ---- tables


def _records(samples: int, **rates: float) -> list[dict[str, Any]]:
    """Records of a comparison in which each kind has a finalist."""
    rows = []
    for kind, rate in rates.items():
        values = {
            "samples_per_s": Quartiles(rate, rate, rate),
            "ratio_to_torch": Quartiles(1, rate / rates["torch"], 2),
        }
        settings = {"model": "gpt", "dtype": "float32", "samples": samples, "way": f"{kind}_x", "kind": kind}
        rows.append({**settings, "trial_samples_per_s": rate, "rounds": 2, "peak_mib": 10 * rate, **values})
    return rows


def test_finalists_stand_beside_pytorchs_best() -> None:
    records = _records(8, torch=50.0, ours=55.0)
    loser = {key: records[0][key] for key in ("model", "dtype", "samples", "kind", "trial_samples_per_s")}
    records.insert(1, {**loser, "way": "torch_slow"})
    assert torch_report.table(records).splitlines()[2:] == [
        "| gpt | float32 | 8 | torch_x | 50.0 | 1.000 (1.000 to 2.000) | 500 | 1.00 |",
        "| gpt | float32 | 8 | ours_x | 55.0 | 1.100 (1.000 to 2.000) | 550 | 1.10 |",
    ]
    assert torch_report.trials(records).splitlines()[2:] == [
        "| gpt | float32 | 8 | torch_x 50.0, torch_slow 50.0, ours_x 55.0 |"
    ]


def test_a_micro_batch_costs_what_its_size_does_not_explain() -> None:
    """300 us for each micro-batch, and 100 for each of its samples."""
    records = [record for size in (1, 2, 4, 8) for record in _records(size, torch=1e6 * size / (300 + 100 * size))]
    assert torch_report.costs(records) == (pytest.approx(300), pytest.approx(100))
    assert torch_report.cost_table(records).splitlines()[2:] == ["| gpt | float32 | PyTorch | 300 | 100 |"]
    assert len(torch_report.cost_table(records[:1]).splitlines()) == 2


def test_the_document_is_that_of_its_numbers() -> None:
    """`python -m tools.evaluation.torch_report` writes it."""
    results = read_results(RESULTS / "speed.json")
    assert (RESULTS / "torch.md").read_text(encoding="utf-8") == torch_report.report(results)
    assert {record["kind"] for record in torch_report.records_of(results)} <= set(KINDS.values())
    assert list(KINDS.values()) == list(torch_report.NAMES)


# ---- memory


def test_peaks_are_those_of_a_process_and_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "if len(sys.argv) > 1: child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "if len(sys.argv) > 1: child.stdout.readline()\n"
        "print(len(bytearray(50 << 20)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = peak_mib([process.pid])
        process.communicate()
    assert 100 < peak < 250
    assert peak_mib([process.pid]) == 0  # It has ended.
    assert peak_mib([os.getpid()]) > 10


# ---- all of it


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install -e .[torch]")
@pytest.mark.parametrize("model", ["gpt:tiny", "bert:tiny", "resnet:tiny"])
def test_pytorch_trains_alike(model: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "speed.json"
    size = [f"--models={model}", "--micro_batches=2", "--samples=2", "--noxla", "--schedules=dapple_a", "--trials=1"]
    size += ["--torch_compiled="]
    assert command.run(bench_torch.main, bench_torch.FLAGS, [*size, "--rounds=2", f"--json={file}"]) == 0
    records = read_results(file)[f"torch {model} float32 2"]["records"]
    finalists = {record["kind"]: record for record in records if "rounds" in record}
    assert len(records) == 8 and list(finalists) == ["torch", "ours"]
    assert finalists["torch"]["ratio_to_torch"]["median"] == 1.0
    assert min(record["peak_mib"] for record in finalists.values()) > 0
    for record in records:
        assert np.allclose(record["losses"], records[0]["losses"], rtol=bench_torch.TOLERANCES["float32"])
