"""Data that workers read themselves: training is the same as with the same data fed by the client."""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_session import FakeWorkers
from models_for_tests import classifier, samples, values, variables

import dapple_tf as dapple
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.execution.worker_data import WorkerData, area_of
from dapple_tf.frontend.on_workers import Address, Drawn, OnWorkers, Round
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import untuned
from dapple_tf.view.time_axis import step_text
from graph_passes.ir.program import Layout

layers = keras.layers

BATCH = 6
X, Y, W = samples(26)  # four full batches, and one of two samples

PIPELINE = dapple.Plan.manual(["first"], [[0], [1]], 2, BATCH)
WIDER = dapple.Plan.manual(["first"], [[0], [1, 2]], 1, BATCH)
REPLICATED = dapple.Plan.manual(["first", "second"], [[0], [1, 2], [3]], 3, BATCH)
SHARED = dapple.Plan.manual(["first"], [[0, 1], [2, 3]], 1, BATCH, shares=[[2, 1], [1, 2]])

Make = Callable[[], tf.data.Dataset]


def dataset(*arrays: Any, seed: int | None = 4, size: int = BATCH) -> tf.data.Dataset:
    own = tf.data.Dataset.from_tensor_slices(arrays)
    own = own if seed is None else own.shuffle(10, seed=seed)
    return untuned(own.batch(size).prefetch(1))


def weighted() -> tf.data.Dataset:
    return dataset(X, Y, W)


def labelled() -> tf.data.Dataset:
    return dataset(X, Y)


def classes() -> keras.Model:
    return classifier(metrics=["accuracy"])


def two_inputs() -> keras.Model:
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    x = layers.Dense(4, activation="tanh", name="first")(left)
    x = layers.Dense(4, name="second")(layers.Concatenate()([x, right]))
    model = keras.Model({"left": left, "right": right}, {"a": layers.Dense(3, name="a")(x), "b": x})
    model.compile("adam", {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"})
    return model


def in_another_order() -> tf.data.Dataset:
    return dataset(collections.OrderedDict([("right", X), ("left", X[::-1])]), {"a": Y, "b": X})


def masked() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True, name="first")(tokens)
    model = keras.Model(tokens, layers.Dense(7, name="second")(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def tokens() -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    return dataset(*(generator.integers(0, 7, size=(26, 5)).astype("int32") for _ in range(2)))


Own = tuple[dapple.PipelinedModel, list[np.ndarray]]


def transformed(plan: dapple.Plan, build: Callable[[], keras.Model], cluster: dapple.Cluster) -> Own:
    """A pipelined model, and its first values."""
    keras.utils.set_random_seed(3)
    own = dapple.transform(build(), cluster, plan)
    return own, values(own.model)


@functools.cache
def here(plan: dapple.Plan, build: Callable[[], keras.Model]) -> Own:
    """One on devices of this process, for all tests: its steps stay prepared."""
    return transformed(plan, build, dapple.Cluster.local(4, kind="cpu"))


def begun(own: Own) -> dapple.PipelinedModel:
    """The model, which begins anew."""
    pipelined, initial = own
    for variable, value in zip(variables(pipelined.model), initial, strict=True):
        variable.assign(value)
    pipelined.reset_metrics()
    pipelined.load()
    return pipelined


def pipelined(plan: dapple.Plan = PIPELINE, build: Callable[[], keras.Model] = classes) -> dapple.PipelinedModel:
    return begun(here(plan, build))


def fitted(own: dapple.PipelinedModel, data: Any, **options: Any) -> tuple[Any, list[np.ndarray]]:
    history = own.fit(data, verbose=0, **({"epochs": 2} | options)).history
    return history, values(own.sync())


def assert_same(ours: Any, theirs: Any) -> None:
    """Bit by bit."""
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(one, other)


def assert_alike(run: Callable[..., Any]) -> None:
    """A function of a function that makes data for the client or for workers gives the same for both."""
    results = []
    for place in (lambda make: make(), dapple.on_workers):
        keras.utils.set_random_seed(3)
        results.append(run(place))
    assert_same(*results)


# ---- equal to data that the client feeds, on devices of this process


def test_a_profiled_step_waits_for_its_batch_and_changes_nothing() -> None:
    """The data's own rounds, their shuffles and their waiting batches stay; a smaller last batch isn't profiled."""
    both = []
    for profiled in (False, True):
        keras.utils.set_random_seed(3)
        own, data = pipelined(), dapple.on_workers(weighted)
        own.fit(data, epochs=1, verbose=0)
        if profiled:
            profile = own.profile_step(data, warm_up=3)
            assert profile.waited_seconds is not None and profile.waited_seconds > 0
            assert profile.measured.samples == BATCH
            assert "of waiting for its batch" in str(profile)
            assert "of waiting for its batch" in step_text(profile.measured)
        both.append(fitted(own, data))
    assert_same(*both)
    with pytest.raises(dapple.DataError, match="sample_weight doesn't go with data on workers"):
        own.profile_step(data, sample_weight=np.ones(BATCH))
    with pytest.raises(dapple.DataError, match="the data have no batch at all"):
        own.profile_step(dapple.on_workers(lambda: labelled().take(0)))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("plan", "make", "build", "options"),
    [
        pytest.param(
            SHARED, lambda: weighted().repeat(), classes, {"steps_per_epoch": 3, "epochs": 3}, id="shares, endless"
        ),
        # A stage in between reads an input of its own. Keras keeps the order of an ``OrderedDict``, iterators of
        # datasets sort its names.
        pytest.param(PIPELINE, in_another_order, two_inputs, {}, id="several inputs and outputs by name"),
        # Losses of masked outputs divide by a number that only the whole batch gives.
        pytest.param(WIDER, tokens, masked, {}, id="divisors of stages and replicas"),
    ],
)
def test_equals_fed_data(plan: dapple.Plan, make: Make, build: Any, options: dict[str, Any]) -> None:
    assert_alike(lambda place: fitted(pipelined(plan, build), place(make), **options))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_validation_evaluation_prediction_and_another_fit() -> None:
    """A dataset that is shuffled anew in each round goes on with its own random numbers; one has no known length."""

    def run(place: Callable[[Make], Any]) -> Any:
        makes = (weighted, lambda: labelled().filter(lambda x, y: True), lambda: dataset(X, seed=None))
        train, other, plain = map(place, makes)
        own = pipelined(REPLICATED)
        histories = [own.fit(train, epochs=2, validation_data=other, verbose=0).history for _ in range(2)]
        return (histories, own.evaluate(other, verbose=0)), [own.predict(plain, verbose=0), *values(own.sync())]

    assert_alike(run)


# ---- the end of the data, and errors


def test_a_step_that_fails_leaves_nothing_that_the_next_fit_waits_for() -> None:
    """Nobody knows which workers have taken its batch, and waiting for one that is gone never ends."""
    wrong = np.random.default_rng(0).integers(0, 7, size=(26, 5)).astype("int32")
    wrong[15] = 99
    own = pipelined(WIDER, masked)
    with pytest.raises(dapple.StepError):
        own.fit(dapple.on_workers(lambda: dataset(wrong, wrong % 7, seed=None)), verbose=0)
    history = own.fit(dapple.on_workers(tokens), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def python_code() -> tf.data.Dataset:
    return labelled().map(lambda x, y: (tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), (None, 4)), y))


def from_generator() -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter([X]), output_signature=tf.TensorSpec((None, 4)))


def drawn() -> tf.data.Dataset:
    return labelled().map(lambda x, y: (x + tf.random.uniform([]), y))


def looked_up() -> tf.data.Dataset:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [2, 1, 0]), 0)
    return labelled().map(lambda x, y: (x, table.lookup(tf.cast(y, tf.int32))))


NOT_SENT = r"can't be read on workers: .*; or feed the data from here"
SEEDLESS = "is shuffled, or draws, without a seed"  # Inputs and labels of different samples would meet.


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        *((make, {}, NOT_SENT) for make in (python_code, from_generator, drawn, looked_up)),
        (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10).batch(BATCH), {}, SEEDLESS),
        (X, {}, "takes a function that returns a tf.data.Dataset, not a nd"),
        (lambda: [X], {}, r"returned a list; let it return a tf.data.Dataset"),
        (lambda: tf.data.Dataset.range(3), {}, "are they batched"),
        (
            lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).ragged_batch(2),
            {},
            r"RaggedTensorSpec.*can't be cut",
        ),
        (labelled(), {"in_parts": True}, "in_parts=True calls a function for each part"),
    ],
)
def test_what_cannot_be_sent_is_refused(data: Any, options: dict[str, Any], text: str) -> None:
    tf.random.set_seed(None)
    with pytest.raises(dapple.DataError, match=text):
        dapple.on_workers(data, **options)


def test_an_order_that_depends_on_speed_is_made_deterministic() -> None:
    mapped = labelled().unbatch().map(lambda x, y: (x, y), num_parallel_calls=4, deterministic=False).batch(BATCH)
    (part,) = dapple.on_workers(mapped).parts(1)
    orders = {node.attr["deterministic"].s for node in part.graph.node if node.op == "ParallelMapDatasetV2"}
    assert orders == {b"true"}


def test_other_places_say_that_they_do_not_read_data_on_workers() -> None:
    own, data = pipelined(), dapple.on_workers(labelled)
    for options in ({"y": Y}, {"sample_weight": W}, {"class_weight": {0: 2.0}}, {"validation_split": 0.5}):
        with pytest.raises(dapple.DataError, match=rf"{next(iter(options))} doesn't go with data on workers"):
            own.fit(data, **options)
    with pytest.raises(dapple.DataError, match="train_on_batch takes a batch of this process; fit, evaluate, predict"):
        own.train_on_batch(data)
    with pytest.raises(dapple.DataError, match="give data on workers alone"):
        own.fit(X, Y, validation_data=(data, None))
    with pytest.raises(dapple.DataError, match="y is data on workers"):
        own.fit(X, data)
    with pytest.raises(TypeError, match="give it to fit, evaluate or predict"):
        next(iter(data))


def test_models_that_work_on_strings_are_refused() -> None:
    words = keras.Input((1,), dtype="string")
    x = layers.Dense(3, name="last")(layers.CategoryEncoding(4)(layers.Hashing(4)(words)))
    model = keras.Model(words, x)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    own = dapple.transform(model, dapple.Cluster.local(1, kind="cpu"), dapple.Plan.manual([], [[0]], 1, BATCH))
    with pytest.raises(dapple.DataError, match="works on strings or by a table, in this process"):
        own.fit(dapple.on_workers(dataset(np.array([["a"]] * 26), Y)), verbose=0)


# ---- positions


class StoppedError(Exception):
    pass


class StopAfter(keras.callbacks.Callback):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise StoppedError


def test_a_resumed_run_reads_the_batches_that_an_undisturbed_one_reads(tmp_path: pathlib.Path) -> None:
    def run(folder: str, **options: Any) -> list[np.ndarray]:
        checkpoint = dapple.Checkpointing(tmp_path / folder, every_steps=2)
        return fitted(pipelined(), dapple.on_workers(labelled), epochs=3, checkpoint=checkpoint, **options)[1]

    undisturbed = run("whole")
    with pytest.raises(StoppedError):
        run("stopped", callbacks=[StopAfter(7)])
    for one, other in zip(run("stopped", resume=True), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- on workers without processes; after faults, and with processes, see test_faults.py


@pytest.fixture
def workers() -> Iterator[FakeWorkers]:
    with FakeWorkers(4).used() as workers:
        yield workers


def on(workers: FakeWorkers, plan: dapple.Plan) -> Own:
    """A model on the workers that a plan needs."""
    addresses = workers.cluster.addresses[: max(map(max, plan.devices)) + 1]
    return transformed(plan, classes, dapple.Cluster.of_servers(addresses, devices_per_server=1))


def shuffled_twice() -> tf.data.Dataset:
    """The second shuffle's iterator makes the first one's, which draws its seed when a batch is read."""
    return untuned(tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(8, seed=1).shuffle(8, seed=2).batch(BATCH))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_worker_that_reads_later_than_others_reads_the_same_order(workers: FakeWorkers) -> None:
    """Labels aren't read in prediction: the last stage's worker begins to read these data in their second round."""
    own = on(workers, PIPELINE)

    def run(place: Callable[[Make], Any]) -> Any:
        data, trained = place(shuffled_twice), begun(own)
        outputs = trained.predict(data, verbose=0)
        history, last = fitted(trained, data)
        return history, [outputs, *last]

    assert_alike(run)
    own[0].close()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_files_that_a_worker_lacks_are_named(tmp_path: pathlib.Path) -> None:
    """Files are each worker's own."""
    file = tmp_path / "numbers"

    def lines() -> tf.data.Dataset:
        numbers = tf.data.TextLineDataset(str(file)).map(tf.strings.to_number)
        return untuned(numbers.map(lambda n: (tf.fill([4], n), tf.cast(n, tf.int32) % 3)).batch(BATCH))

    own = pipelined()
    with pytest.raises(dapple.DataError, match=r"worker 0 can't read batch 1 of round 1: .*numbers; No such file"):
        own.fit(dapple.on_workers(lines), verbose=0)
    file.write_text("".join(f"{number}\n" for number in range(12)))
    own.fit(dapple.on_workers(lines), verbose=0)


# ---- in parts


def part(context: tf.distribute.InputContext) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((X, Y, W)).shuffle(30, seed=2)
    rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
    return untuned(rows.batch(context.get_per_replica_batch_size(BATCH), drop_remainder=True))


def union(micro_batches: int) -> tf.data.Dataset:
    """What two workers read together: each micro-batch has samples of the first one, then of the second one."""
    size = BATCH // 2 // micro_batches
    parts = [part(tf.distribute.InputContext(2, index, 2)).unbatch().batch(size) for index in range(2)]
    joined = tf.data.Dataset.zip(tuple(parts)).map(
        lambda *both: tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *both)
    )
    batches = joined.unbatch().batch(BATCH, drop_remainder=True)
    return untuned(batches.apply(tf.data.experimental.assert_cardinality(4)))


def test_parts_of_batches_are_read_by_those_who_train_on_them(workers: FakeWorkers) -> None:
    """No batch stays with a worker whose part is longer: one stayed in each epoch, which the other one didn't have."""
    plan = dapple.Plan.manual(["first"], [[0, 1], [2, 3]], 3, BATCH)
    trained, results = on(workers, plan), []
    for make in (lambda: dapple.on_workers(part, in_parts=True), lambda: union(plan.micro_batches)):
        keras.utils.set_random_seed(3)
        results.append(fitted(begun(trained), make()))
    assert_same(*results)

    def uneven(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((X, Y, W)).take(12 + 6 * context.input_pipeline_id)
        return untuned(rows.batch(context.get_per_replica_batch_size(BATCH), drop_remainder=True))

    own, _ = trained
    data = dapple.on_workers(uneven, in_parts=True)
    own.fit(data, epochs=2, verbose=0)
    session = own._engine.session
    first, _ = data.parts(2)
    dtypes = [first.specs[index].dtype.name for index in first.order]
    memory = {"dtypes": dtypes, "shared_name": area_of(dtypes)}
    with tf.Graph().as_default() as graph:
        for task, device in enumerate(workers.cluster.device_names):
            with tf.device(device):
                tf.raw_ops.MapSize(**memory, name=f"size{task}")
    session.add(graph.as_graph_def(), "sizes")
    assert session.run([f"sizes/size{task}:0" for task in range(4)]) == [0] * 4
    own.close()


def test_parts_of_another_size_or_of_stages_that_cut_batches_otherwise_are_refused(workers: FakeWorkers) -> None:
    own, _ = on(workers, WIDER)
    text = r"worker 1 needs samples 0 to 2 of each batch, but the first stage's workers read 0 to 5: .*leave out in_par"
    with pytest.raises(dapple.DataError, match=text):
        own.fit(dapple.on_workers(part, in_parts=True), verbose=0)
    own.close()
    text = r"part 0 of batch 5 has 2 samples on worker 0, .* take 6 of each 6: let"
    with pytest.raises(dapple.DataError, match=text):
        pipelined().fit(dapple.on_workers(lambda context: weighted(), in_parts=True), verbose=0)


# ---- the order of batches follows from their addresses, whatever was read before


def numbers(first: int = 0, count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(first, first + count)


def shuffled(first: int = 0, seed: int = 1, count: int = 10) -> tf.data.Dataset:
    return numbers(first, count).shuffle(10, seed=seed)


def nested(number: tf.Tensor) -> tf.data.Dataset:
    """With seeds of its own."""
    drawn = lambda n: n + 10 * number + tf.random.stateless_uniform([], (1, n), 0, 5, tf.int64)  # noqa: E731
    return numbers(count=3).map(drawn).shuffle(3, seed=number)


def read_twice(join: Callable[[tf.data.Dataset], tf.data.Dataset]) -> tf.data.Dataset:
    return join(shuffled())


DATASETS: dict[str, tuple[Make, Drawn]] = {
    "one_order": (lambda: numbers().shuffle(10, seed=1, reshuffle_each_iteration=False).repeat(2), Drawn.NONE),
    "in_functions": (lambda: numbers(count=4).interleave(nested, cycle_length=2), Drawn.NONE),
    "windows": (lambda: shuffled().window(3).flat_map(lambda window: window), Drawn.BEGUN),
    "random": (lambda: tf.data.Dataset.random(3, rerandomize_each_iteration=True).take(10), Drawn.BEGUN),
    "zip": (lambda: tf.data.Dataset.zip((shuffled(), shuffled())).map(lambda *two: 100 * two[0] + two[1]), Drawn.BEGUN),
    "paired": (
        lambda: read_twice(lambda own: tf.data.Dataset.zip((own, own)).map(lambda *two: 100 * two[0] + two[1])),
        Drawn.BEGUN,
    ),
    "files_and_samples": (
        lambda: shuffled(count=4).interleave(nested, cycle_length=2).shuffle(5, seed=2),
        Drawn.FIRST,
    ),
    "cached": (lambda: shuffled().cache(), Drawn.LATER),
    "read_twice": (lambda: read_twice(lambda own: own.skip(3).concatenate(own.take(3))), Drawn.LATER),
    "in_a_function": (lambda: read_twice(lambda own: numbers(count=2).flat_map(lambda _: own)), Drawn.LATER),
}


def in_batches(make: Make) -> Make:
    return lambda: untuned(make().batch(4))


class Reading:
    """The data of one worker, in a session of this process."""

    def __init__(self, source: OnWorkers) -> None:
        cluster = dapple.Cluster.local(1, kind="cpu")
        self.source = source
        self.session = DeviceSession(cluster, dapple.FaultPolicy())
        self.data = WorkerData(cluster, self.session, Layout((tuple(cluster.device_names),), 4, 4, 1))

    def take(self, address: Address) -> list[Any]:
        """Takes a batch as a step does; returns its first array."""
        number = self.data.prepare(address)
        (reader,) = self.data._readers.values()
        batch = self.session.run(reader.at("drop:0"), {reader.at("number:0"): number})
        self.data.taken(address, [reader.host])
        own: list[Any] = np.asarray(batch).tolist()
        return own

    def round(self, most: int | None = None, start: int = 0) -> list[list[Any]]:
        """Reads the next round, to its end or at most some batches of it."""
        taken: list[list[Any]] = []

        def read(address: Address) -> Any:
            shapes = self.data.read(address)
            if shapes is not None:
                taken.append(self.take(address))
            return shapes

        for count, _ in enumerate(Round(self.source, read, start), start=1):
            if count == most:
                break
        return taken


@pytest.fixture
def reading() -> Iterator[Callable[[OnWorkers], Reading]]:
    opened: list[Reading] = []

    def open_(source: OnWorkers) -> Reading:
        opened.append(Reading(source))
        return opened[-1]

    yield open_
    for own in opened:
        own.session.close()


@pytest.mark.parametrize("name", DATASETS)
def test_a_new_reader_goes_on_as_the_one_before(name: str, reading: Callable[[OnWorkers], Reading]) -> None:
    """A run that is resumed, or goes on after a fault, gets the orders of an undisturbed one in later epochs, too.

    Iterators of some datasets draw seeds when they are read: of two shuffles, one within a repetition, before a cache.
    """
    tf.random.set_seed(3)  # TensorFlow compares seeds that are tensors with another one of 0.
    own, drawn = DATASETS[name]
    make = in_batches(own)
    (part,) = dapple.on_workers(make).parts(1)
    assert part.drawn is drawn  # Earlier rounds are read again only as far as that takes.
    plain = make()
    expected = [[batch.numpy().tolist() for batch in plain] for _ in range(4)]
    source = dapple.on_workers(make)
    one = reading(source)
    assert [one.round() for _ in range(2)] == expected[:2]
    assert reading(source).round(start=1) == expected[2][1:]
    assert reading(source).round() == expected[3]


def test_rounds_that_were_not_read_to_their_ends_are_read_as_far(reading: Callable[[OnWorkers], Reading]) -> None:
    make = in_batches(lambda: shuffled().repeat(3))
    plain = make()
    for _ in zip(range(2), plain, strict=False):
        pass
    expected = [batch.numpy().tolist() for batch in plain]
    source = dapple.on_workers(make)
    reading(source).round(most=2)
    assert reading(source).round() == expected


@pytest.mark.usefixtures("_cache_of_readers")
def test_readers_of_files_are_sent(reading: Callable[[OnWorkers], Reading]) -> None:
    """They are checked by `Assert`, and draw by stateless random ops."""
    example = keras.Sequential([keras.Input((16, 16, 3)), layers.Flatten(), layers.Dense(10)])
    example.compile("sgd", "sparse_categorical_crossentropy")
    images = untuned(find_data("images").batches(example, 4, 0))
    plain = [batch.numpy().tolist() for batch, _ in images.take(2)]
    assert reading(dapple.on_workers(images)).round(most=2) == plain


def test_a_dataset_that_is_read_twice_is_one_node() -> None:
    once = shuffled()
    (part,) = dapple.on_workers(tf.data.Dataset.zip((once, once)).map(lambda one, other: one).batch(4)).parts(1)
    assert [node.op for node in part.graph.node].count("ShuffleDatasetV3") == 1
