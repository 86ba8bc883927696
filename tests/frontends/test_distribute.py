"""`tf.distribute`: several workers, each a process with an arena and a limit of its own, and several devices of one
process that share an arena, whose sum the limit bounds.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from nets import WIDTH, Net, averaged, batch, grappler_off, pool_in_use, trained
from processes import on_arena, on_workers
from step_peaks import measuring
from swap_copies import eventually
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys, CollectiveReplicaLauncher

import tfswap
import tfswap.compiler.prepare as prepare
from tfswap.analysis.collectives import spans_workers
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import carry_between_devices
from tfswap.passes.prepare.collective_order import expand_collectives, join_collectives, order_collectives


class Worker:
    """A net of one worker of several, its step and its batches."""

    def __init__(self, rank):
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.net = Net()
        self.start = [weight.numpy() for weight in self.net.weights]
        _, self.step = averaged(self.strategy, self.net)
        self.calls = [(batch(1024, seed=2 * i + rank),) for i in range(3)]

    def as_undecorated(self, limit):
        taken = []  # keys of collectives: who takes others than the other workers do waits for ever
        take = CollectiveKeys.get_instance_key

        def taking(keys, *of):
            taken.append(of)
            return take(keys, *of)

        with grappler_off():
            expected, _ = trained(self.net.weights, self.start, tf.function(self.step), *self.calls)
        CollectiveKeys.get_instance_key = taking
        optimized = tfswap.optimize(tf.function(self.step), memory_limit=limit)
        try:
            found, peak = trained(self.net.weights, self.start, optimized, *self.calls)
        finally:
            CollectiveKeys.get_instance_key = take
        assert len(taken) == 2 * len(self.calls), taken
        return found == expected, peak, optimized


def test_workers_carry_out_one_plan_under_the_limit_of_each():
    # The second worker's arena is in pieces, and its limit is one that it would have an easier plan for.

    def program(rank):
        worker = Worker(rank)
        _pieces = [tf.zeros([1000 + 331 * i]) for i in range(40)][::3] if rank else []
        same, peak, optimized = worker.as_undecorated(["60%", "95%"][rank])
        limit, plan = optimized.report().memory_limit_bytes, optimized.plan()
        return [same, peak <= limit, limit, plan.order, [(a.tensor, a.release, a.use) for a in plan.evictions]]

    (same, kept, limit, *plan), (same_there, kept_there, limit_there, *plan_there) = on_workers(program)
    assert same
    assert same_there
    assert kept
    assert kept_there
    assert limit < limit_there
    assert plan == plan_there
    assert plan[1], "it moves something"


def test_all_workers_refuse_what_one_can_not_keep_and_train_with_more():
    def program(rank):
        worker = Worker(rank)
        try:
            worker.as_undecorated([None, 100_000][rank])
        except tfswap.InfeasibleMemoryLimit as error:
            floor = error.floor_bytes
        same, peak, _ = worker.as_undecorated(max(floor, 5 << 20))
        return [floor, same, peak <= max(floor, 5 << 20)]

    (floor, *kept), (floor_there, *kept_there) = on_workers(program)
    assert floor == floor_there > 100_000
    assert all((*kept, *kept_there))


def test_collectives_come_in_one_order_on_all_workers():
    # Without tokens nothing but the traced order is common to two of them; the second worker's graph has lost that.

    def program(rank):
        worker = Worker(rank)
        CollectiveReplicaLauncher._prefer_ordering_token = False
        order = prepare.order_collectives

        def of_a_graph_turned_round(graph, target):
            if rank:
                graph._nodes = dict(reversed(graph._nodes.items()))
            return order(graph, target)

        prepare.REST = tuple(
            row._replace(apply=of_a_graph_turned_round) if row.apply is order else row for row in prepare.REST
        )

        def sums(x):
            reduce = tf.distribute.get_replica_context().all_reduce
            return [reduce("sum", tf.reduce_mean(tf.sin(x @ weight), 0)) for weight in worker.net.weights]

        optimized = tfswap.optimize(tf.function(lambda x: worker.strategy.run(sums, (x,))), memory_limit="104%")
        for call in worker.calls:
            found = optimized(*call)
        names = [name for name in optimized.plan().order if "CollectiveReduce" in name]
        return [names, [each.numpy().tobytes().hex() for each in found]]

    (order, sums), (order_there, sums_there) = on_workers(program)
    assert len(order) == 6
    assert order == order_there
    assert sums == sums_there


def test_a_keras_model_of_several_workers_is_refused_before_its_fit_fails():
    def program():
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        import keras

        import tfswap

        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        try:
            tfswap.keras.optimize(model, memory_limit="60%")
        except tfswap.TfswapError as error:
            return str(error)

    reported = on_workers(program)
    assert "examples/multi_worker.py" in reported[0]
    assert reported[0] == reported[1]


COLLECTIVES = """
%key = Placeholder() -> int32[]
%later_key = Placeholder() -> int32[]
%size = Const() -> int32[] = (2,)
%group = Const() -> int32[] = (7,)
%x = Placeholder() -> float32[8]
%later = CollectiveReduceV2(%x, %size, %group, %later_key) -> float32[8]
%first = CollectiveReduceV2(%x, %size, %group, %key) -> float32[8]
feeds %x, %key, %later_key
fetches %later, %first
"""


def test_collectives_wait_for_those_that_were_traced_before_them():
    graph = parse_graph(COLLECTIVES)
    assert spans_workers([graph])
    assert order_collectives(graph, Target(DeviceModel())) == 1
    assert graph["later"].controls == (graph["first"],)
    assert order_collectives(graph, Target(DeviceModel())) == 0


def test_collectives_among_the_devices_of_one_worker_do_not_span_workers():
    graph = parse_graph(COLLECTIVES)
    graph["first"].device, graph["later"].device = "/device:CPU:0", "/device:CPU:1"
    assert not spans_workers([graph])


def test_collectives_of_a_group_on_several_devices_are_planned_as_one_and_run_concurrently():
    graph = parse_graph(COLLECTIVES)
    graph["first"].device, graph["later"].device = "/device:CPU:0", "/device:CPU:1"
    assert join_collectives(graph, Target(DeviceModel())) == 1
    assert len({fetch.node for fetch in graph.fetches}) == 1
    before = graph.add("NoOp", "before")
    (together,) = [node for node in graph if node.op == "Tfswap>Together"]
    graph.add_control(together, before)
    assert expand_collectives(graph, Target(DeviceModel())) == 2
    assert [fetch.node.name for fetch in graph.fetches] == ["later", "first"]
    assert graph["first"].controls == graph["later"].controls == (graph["before"],)


def test_collectives_of_a_group_wait_for_what_any_of_them_reads():
    # Who begins earlier holds what it reads, and scratch memory, until the last one begins.
    graph = parse_graph("""
        %x = Placeholder() -> float32[8]
        %key = Placeholder() -> int32[]
        %size = Const() -> int32[] = (2,)
        %group = Const() -> int32[] = (7,)
        %a = Sin(%x) @"/device:CPU:0" -> float32[8]
        %b = Cos(%x) @"/device:CPU:1" -> float32[8]
        %first = CollectiveReduceV2(%a, %size, %group, %key) @"/device:CPU:0" -> float32[8]
        %second = CollectiveReduceV2(%b, %size, %group, %key) @"/device:CPU:1" -> float32[8]
        feeds %x, %key
        fetches %first, %second
    """)
    assert join_collectives(graph, Target(DeviceModel())) == 1
    assert expand_collectives(graph, Target(DeviceModel())) == 2
    assert graph["b"] in graph["first"].controls
    assert graph["a"] in graph["second"].controls


def test_tensors_travel_between_devices_in_carriers():
    graph = parse_graph("""
        %x = Placeholder() -> float32[8]
        %a = Sin(%x) @"/device:CPU:0" -> float32[8]
        %b = Cos(%a) @"/device:CPU:1" -> float32[8]
        %c = Tan(%a) @"/device:CPU:1" -> float32[8]
        %d = AddV2(%a, %x) @"/device:CPU:0" -> float32[8]
        feeds %x
        fetches %b, %c, %d
    """)
    assert carry_between_devices(graph, Target(DeviceModel())) == 1
    (deliver,) = {t.node for name in "bc" for t in graph[name].inputs}
    assert (deliver.op, deliver.device) == ("Tfswap>Deliver", "/device:CPU:1")
    assert graph["d"].inputs[0].node.name == "a"


def settle():
    """Makes two devices of the CPU, and one free region of the arena that they share."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    slab = tf.raw_ops.Empty(shape=[500 << 20], dtype=tf.uint8)
    del slab


def as_undecorated(weights, function, limit, calls, run=lambda step: step):
    start = [weight.numpy() for weight in weights]
    with grappler_off():
        expected, _ = trained(weights, start, run(tf.function(function)), *calls)
    optimized = tfswap.optimize(tf.function(function), memory_limit=limit)
    found, peak = trained(weights, start, run(optimized), *calls)
    report = optimized.report()
    moved = len(optimized.plan().evictions)
    return [found == expected, peak, report.planned_peak_bytes, report.memory_limit_bytes, moved]


class Mirrored:
    """A net on two devices of this process, its step and its batches."""

    def __init__(self, across=None, net=Net):
        settle()
        self.strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=across)
        with self.strategy.scope():
            self.net = net()
        self.replica, self.step = averaged(self.strategy, self.net)
        self.calls = [(self.batch(self.part(seed)),) for seed in range(3)]

    def part(self, seed):
        return lambda context: batch(1024, seed=2 * seed + context.replica_id_in_sync_group)

    def batch(self, part):
        return self.strategy.experimental_distribute_values_from_function(part)


@pytest.mark.parametrize("across", [None, tf.distribute.ReductionToOneDevice])
def test_a_limit_bounds_the_sum_of_devices_that_share_an_arena(across):
    def program():
        devices = Mirrored(across and across())
        return as_undecorated(devices.net.weights, devices.step, "45%", devices.calls)

    same, peak, planned, limit, moved = on_arena(program)
    assert same
    assert peak == planned <= limit
    assert moved


class Checked(Net):
    def loss(self, x):
        loss = super().loss(x)
        tf.debugging.assert_all_finite(loss, "the loss")
        return loss


def test_a_step_in_which_one_replica_fails_ends_and_the_next_one_works():
    def program():
        devices = Mirrored(net=Checked)
        weights = devices.net.weights
        start = [weight.numpy() for weight in weights]
        with grappler_off():
            expected, _ = trained(weights, start, tf.function(devices.step), *devices.calls)
        optimized = tfswap.optimize(tf.function(devices.step), memory_limit="45%")
        optimized(*devices.calls[0])

        def after_failing(failing):
            def spoilt(context):
                return devices.part(0)(context) * (float("nan") if context.replica_id_in_sync_group == failing else 1.0)

            try:
                optimized(devices.batch(spoilt))
            except tf.errors.InvalidArgumentError as error:
                reported = str(error)
            whole = eventually(lambda: pool_in_use() == 0)  # TensorFlow reports the error before all parts have ended
            values, peak = trained(weights, start, optimized, *devices.calls)
            moved = len(optimized.plan().evictions)
            return [reported, whole, values == expected, peak, optimized.report().memory_limit_bytes, moved]

        return [after_failing(0), after_failing(1)]

    found = on_arena(program)
    for reported, whole, same, peak, limit, moved in found:
        assert "the loss" in reported
        assert whole
        assert same
        assert peak <= limit
        assert moved


def test_strategies_run_a_decorated_function_on_several_devices():
    def program():
        devices = Mirrored()
        strategy = devices.strategy
        rows = tf.data.Dataset.from_tensor_slices(batch(3 * 2048))
        calls = [(x,) for x in strategy.experimental_distribute_dataset(rows.batch(2048, drop_remainder=True))]

        def eager(step):
            return lambda x: strategy.run(step, (x,)).values

        def inside(step):
            return tf.function(lambda x: strategy.reduce("MEAN", strategy.run(step, (x,)), None))

        return [as_undecorated(devices.net.weights, devices.replica, "60%", calls, run) for run in (eager, inside)]

    found = on_arena(program)
    for same, peak, _, limit, moved in found:
        assert same
        assert peak <= limit
        assert moved


def test_variables_that_share_a_buffer_are_planned_with_their_own_inside_another_function():
    # As replicas' variables share one when they have been assigned a value: the first update takes another.

    def program():
        import tensorflow as tf
        from nets import Net

        import tfswap

        net = Net(width=512)
        shared = net.weights[0].read_value()
        for weight in net.weights:
            weight.assign(shared)
        del shared
        x = tf.random.stateless_normal([256, 512], seed=(1, 1))
        step = tfswap.optimize(tf.function(net.step), memory_limit="80%")
        around = tf.function(lambda x: step(x) + 1.0)
        around.get_concrete_function(x)
        peaks = []
        for _ in range(2):
            with measuring(peaks):
                around(x)
        return [*peaks, step.report().memory_limit_bytes]

    peak, again, limit = on_arena(program)
    assert peak <= limit
    assert again <= limit


def test_a_step_placed_by_hand_over_devices_keeps_its_limit():
    def program():
        settle()
        weights = []
        for i in range(6):
            with tf.device(f"CPU:{i // 3}"):
                weights.append(tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(i, 0)) * 0.1))

        def step(x):
            with tf.GradientTape() as tape:
                h = x
                for i, weight in enumerate(weights):
                    with tf.device(f"CPU:{i // 3}"):
                        h = tf.nn.relu(tf.sin(h @ weight))
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return as_undecorated(weights, step, "60%", [(batch(seed=i),) for i in range(3)])

    same, peak, planned, limit, moved = on_arena(program)
    assert same
    assert peak == planned <= limit
    assert moved


def test_what_runs_elsewhere_is_refused_by_name():
    def program():
        settle()
        reported, net = [], Net()

        def refused(function):
            try:
                tfswap.optimize(tf.function(function), memory_limit="60%")(batch())
            except tfswap.UnsupportedGraph as error:
                reported.append(str(error))

        def looped(x):
            def body(i):
                with tf.device("CPU:1"):
                    return i + tf.cast(tf.reduce_sum(tf.sin(x)) > 1e9, tf.int32) + 1

            return net.step(x), tf.while_loop(lambda i: i < 3, body, [0])

        def remote(x):
            with tf.device("/job:worker/task:1/device:CPU:0"):
                return net.step(x)

        def variable_there(x):
            return net.step(x) + tf.reduce_mean(there)

        refused(tf.autograph.experimental.do_not_convert(looped))
        refused(remote)
        server = tf.distribute.Server.create_local_server()
        cluster = tf.train.ClusterSpec({"worker": [server.target.removeprefix("grpc://")]})
        tf.config.experimental_connect_to_cluster(cluster, make_master_device_default=False)
        with tf.device("/job:worker/task:0/device:CPU:0"):
            there = tf.Variable(tf.ones([4]))
        refused(variable_there)
        return reported

    found = on_arena(program)
    assert "in a loop outside" in found[0]
    assert "another process's" in found[1]
    assert "another process's" in found[2] and "what variables there take" in found[2]
