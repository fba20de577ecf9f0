from __future__ import annotations

import gc
import importlib
import pathlib

import pytest
from conftest import first_difference


@pytest.mark.parametrize(
    ("expected", "actual", "shown"),
    [
        ("same\n", "same\n", ""),
        ("a\nbcd\n", "a\nbXd\n", "line 2\n  expected: bcd\n  actual:   bXd\n             ^"),
        ("a\nbcd\n", "a\nbd\n", "line 2\n  expected: bcd\n  actual:   bd\n             ^"),
        ("aa", "aaa", "line 1\n  expected: aa\n  actual:   aaa\n              ^"),
        ("a\nbc", "a", "line 2 is only in the expected text\n  bc\n  ^^"),
    ],
)
def test_first_difference(expected: str, actual: str, shown: str) -> None:
    assert first_difference(expected, actual) == shown


@pytest.fixture
def _own_garbage() -> None:
    """Each inner run looks for garbage time and again, which takes seconds in what other tests have left in memory."""
    importlib.import_module("keras")  # An inner run forgets what it imports, and TensorFlow can't be imported twice.
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_own_garbage")
def test_golden_file_is_blessed_then_compared(pytester: pytest.Pytester) -> None:
    pytester.copy_example(str(pathlib.Path(__file__).with_name("conftest.py")))
    pytester.makepyfile(
        """
        import pathlib

        def test_it(golden):
            golden("folder/text.txt", pathlib.Path("now.txt").read_text())
        """
    )
    now = pytester.path / "now.txt"

    def outcome(*arguments: str) -> str:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        return "" if result.ret == 0 else result.stdout.str()

    now.write_text("one\ntwo\n")
    assert "tests/golden/folder/text.txt doesn't exist; run `make bless`" in outcome()
    assert outcome("--bless") == ""
    assert outcome() == ""
    now.write_text("one\ntoo\n")
    report = outcome()
    assert "tests/golden/folder/text.txt, line 2" in report
    assert "actual:   too\n             ^" in report


def test_float_type_is_restored(pytester: pytest.Pytester) -> None:
    import keras

    pytester.copy_example(str(pathlib.Path(__file__).with_name("conftest.py")))
    pytester.makepyfile(
        """
        import keras, numpy, random

        def test_first():
            assert keras.backend.floatx() == "float32"
            keras.backend.set_floatx("float64")
            global draws
            draws = (random.random(), numpy.random.rand())

        def test_second():
            assert keras.backend.floatx() == "float32"
            assert draws == (random.random(), numpy.random.rand())
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
    assert keras.backend.floatx() == "float32"


def test_what_is_skipped_is_said_in_the_end_once_for_each_reason(pytester: pytest.Pytester) -> None:
    pytester.copy_example(str(pathlib.Path(__file__).with_name("conftest.py")))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.skipif(True, reason="needs a tool (apt-get install tool)")
        @pytest.mark.parametrize("number", range(3))
        def test_by_mark(number): ...

        def test_by_call():
            pytest.skip("needs another (pip install another)")

        def test_passes(): ...
        """
    )
    lines = pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.lines
    start = next(number for number, line in enumerate(lines) if "4 tests skipped" in line)
    assert lines[start + 1 : start + 3] == [
        "    3 needs a tool (apt-get install tool)",
        "    1 needs another (pip install another)",
    ]
