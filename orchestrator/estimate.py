"""The step of a tensor- and pipeline-parallel run, composed from one rank's compiled program.

Those strategies do not partition yet, so `validate` compiles the program of one rank (its share of
heads, MLP width, vocabulary and layers) and adds here what the ranks do together: collectives of
tensor parallelism, sends between stages, the reduction of gradients. Every formula names its
source; rates and latencies are the network's, exactly as in a simulated run. Nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.cost import collective_time
from collectives.ops import CollectiveKind
from compiler.dtypes import DType
from orchestrator.published import PublishedRun
from sim_cluster.network import Network

DTYPES = {"f32": DType.F32, "bf16": DType.BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Times of one rank's program: a micro-batch through its layers, what the last stage has
    besides (embedding, head, loss), and the optimizer."""

    layers_ps: int
    ends_ps: int
    update_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A composed step. `parts_ps` sums to `step_time_ps`."""

    step_time_ps: int
    parts_ps: Mapping[str, int]


def split_ends(once: RankTime, twice: RankTime) -> RankTime:
    """A rank's time with layers and ends told apart, from programs of L and of 2 L layers.

    Both arguments hold all of a micro-batch in `layers_ps`. Time is linear in equal layers: what
    doubles is layers, the rest is embedding, head and loss.
    """
    layers = twice.layers_ps - once.layers_ps
    return RankTime(layers_ps=layers, ends_ps=once.layers_ps - layers, update_ps=once.update_ps)


def compose(run: PublishedRun, rank: RankTime, network: Network, rank_params: int) -> Estimate:
    """The step of `run`. `rank_params` counts the parameters one rank stores.

    Source: 1F1B keeps (m - 1) micro-batches behind the slowest stage and passes every stage once
    (Narayanan et al. 2021, section 2.2); here the last stage is the slowest, it has the head.
    """
    price = _Prices(run, network)
    m, later = run.num_microbatches, run.pp - 1
    middle, last = rank.layers_ps, rank.ends_ps
    tp_layers = run.layers // run.pp * price.tensor_layer()
    tp_ends = price.tensor_ends()
    send = price.sends()
    parts = {
        "compute": m * (middle + last),
        "tensor": m * (tp_layers + tp_ends),
        "bubble": later * (middle + tp_layers + send),
        "send": m * send,
        "gradients": price.gradients(rank_params),
        "optimizer": rank.update_ps // (run.dp if run.zero1 else 1),
    }
    return Estimate(step_time_ps=sum(parts.values()), parts_ps=parts)


@dataclass(frozen=True, slots=True)
class _Prices:
    """What the ranks of a run pay for communication, in picoseconds."""

    run: PublishedRun
    network: Network

    def _time(self, kind: str, axis: str, elements: int, dtype: DType) -> int:
        """One collective in all groups of an axis; `elements` of the larger side of a rank."""
        groups = self.network.groups((axis,))
        if groups.size == 1:
            return 0
        pairs = []
        if kind == "collective_permute":
            pairs = [(stage, stage + 1) for stage in range(groups.size - 1)]
        return collective_time(
            CollectiveKind(kind),
            self.network.topology,
            groups,
            elements * dtype.bytes,
            dtype.bytes,
            self.network.costs,
            pairs=pairs,
        ).total_ps

    @property
    def _tokens(self) -> int:
        return self.run.micro_batch * self.run.seq_len

    def _activations(self, kind: str) -> int:
        dtype = DTYPES[self.run.storage.activations]
        return self._time(kind, "tp", self._tokens * self.run.hidden, dtype)

    def tensor_layer(self) -> int:
        """Collectives of tensor parallelism in one layer, forward and backward.

        Source: without sequence parallelism two all-reduces forward and two backward, two more
        when the layer is recomputed (Shoeybi et al. 2019, section 3). With it every all-reduce is
        a reduce-scatter and an all-gather, and the backward pass gathers the inputs of both
        products again (Korthikanti et al. 2022, sections 4.2.2 and 5).
        """
        again = self.run.remat == "full"
        if not self.run.sequence_parallel:
            return (4 + 2 * again) * self._activations("all_reduce")
        gathers, scatters = 6 + 2 * again, 4 + 2 * again
        return gathers * self._activations("all_gather") + scatters * self._activations(
            "reduce_scatter"
        )

    def tensor_ends(self) -> int:
        """Collectives of the vocabulary-parallel embedding, head and loss.

        Source: Shoeybi et al. 2019, section 3: one all-reduce after the embedding, one of the
        head's input gradient, and maximum, sum of exponentials and target score of every token
        in the loss (fp32). With sequence parallelism reduce-scatter, two gathers and a scatter.
        """
        scores = 3 * self._time("all_reduce", "tp", self._tokens, DType.F32)
        if not self.run.sequence_parallel:
            return 2 * self._activations("all_reduce") + scores
        gathers, scatters = 3, 2
        return (
            gathers * self._activations("all_gather")
            + scatters * self._activations("reduce_scatter")
            + scores
        )

    def sends(self) -> int:
        """Activations to the next stage and their gradient back, for one micro-batch.

        With sequence parallelism every rank sends its part of the sequence.
        Source: Narayanan et al. 2021, section 3.2; the network's direct sends.
        """
        dtype = DTYPES[self.run.storage.activations]
        share = self.run.tp if self.run.sequence_parallel else 1
        elements = self._tokens * self.run.hidden // share
        return 2 * self._time("collective_permute", "pp", elements, dtype)

    def gradients(self, rank_params: int) -> int:
        """Gradients over the data-parallel ranks, once per step, and with ZeRO-1 the new weights.

        Source: Rajbhandari et al. 2020, section 7.2.1: all-reduce, or reduce-scatter of gradients
        and all-gather of parameters.
        """
        grads, params = (DTYPES[n] for n in (self.run.storage.gradients, self.run.storage.params))
        axis = "dp_replicate"
        if not self.run.zero1:
            return self._time("all_reduce", axis, rank_params, grads)
        scatter = self._time("reduce_scatter", axis, rank_params, grads)
        return scatter + self._time("all_gather", axis, rank_params, params)
