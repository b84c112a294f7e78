"""One decoder layer on the ops: attention, then an MLP or experts, each added to the input."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import cast

import torch
from torch import Tensor

from qoff.kernels.embedding import embedding
from qoff.kernels.layout.ending import PLAIN, XIELU, Ending, Norm, Xielu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops, exact
from qoff.memory import EXPERTS, TiledMatrix, Unit, Weights
from qoff.memory.experts import StreamedExperts
from qoff.models import names
from qoff.models.attention_weights import ATTENTION_OUT, recurrent_output
from qoff.models.forward_pass import ForwardPass, columns, first_rows, mlp_tokens, moved_up
from qoff.models.spec import DecoderSpec

from .attention import Attention
from .choices import Choice, Chosen
from .experts import Experts, likeliest
from .linear import Linear, Rows, Steps, fetch, norm_of, tiled, vector
from .per_layer import PerLayer
from .recurrent import recurrent_of
from .streams import HALVED, Streams


class Layer:
    """Computes a layer of a forward pass, in place of its hidden states."""

    MIXTURE = Experts

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        shapes: Sequence[HeadShape],
        device: torch.device | None = None,
    ) -> None:
        """shapes: of the layers that attend. device: of hidden states."""
        self._spec, self._ops = spec, ops
        self._on_gpu = ops.CACHE == "device"
        self._linear = Linear(ops)
        self._exact_ops = exact(ops)  # for scores that decide
        self._exact_linear = Linear(self._exact_ops)
        self._experts = None if spec.experts is None else self.MIXTURE(spec.experts, ops)
        self._of_scores = PLAIN  # of a router
        if spec.experts is not None and spec.experts.score_cap:
            self._of_scores = Ending(soft_cap=spec.experts.score_cap)
        self._activations = [
            Ending(spec.activation, spec.gated, limit=spec.limit(layer))
            for layer in range(spec.num_layers)
        ]
        self._cuts = [spec.deviations(layer) for layer in range(spec.num_layers)]
        self._attention = Attention(spec, ops, shapes, device)
        self._recurrent = recurrent_of(spec, ops)
        # Of layers; read once, as a GPU would have to wait.
        self._scales, self._xielu = dict[int, float](), dict[int, Xielu]()
        own = spec.per_layer
        self._per_layer = None if own is None else PerLayer(spec, own, ops, self._together)
        self.streams = None if spec.streams is None else Streams(spec, ops)

    def steps(
        self, layer: int, weights: Weights, run: ForwardPass, keep: Sequence[int] | None = None
    ) -> Steps:
        """Compute a layer; yields the tiles it waits for. Returns the hidden states.

        keep: rows, ascending, with which alone it goes on after attention; None: with all.
        """
        if EXPERTS in weights:
            chosen = yield from self.until_experts(layer, weights, run, keep)
            return (yield from self.from_experts(layer, weights, run, chosen))
        attended = yield from self._attended(layer, weights, run, keep)
        if self._spec.has_experts(layer):
            yield from self._mixture(layer, weights, run)
        elif self._spec.has_mlp(layer):
            yield from self._mlp(layer, weights, run, attended if self._spec.parallel else None)
        return (yield from self._end(layer, weights, run))

    def adapt(self, layer: int, run: ForwardPass) -> None:
        """Have adapters add to a layer's matrices from now on."""
        if run.adapters is not None:
            run.added = run.adapters.layers[layer]

    def forget_weights(self) -> None:
        """Hold no weights any more."""
        if self._experts is not None:
            self._experts.forget_weights()

    def until_experts(
        self, layer: int, weights: Weights, run: ForwardPass, keep: Sequence[int] | None = None
    ) -> Generator[Unit, Weights, Chosen]:
        """Compute a layer up to where it waits for experts that come one by one; see `steps`."""
        yield from self._attended(layer, weights, run, keep)
        return (yield from self._choose(weights, run))

    def from_experts(self, layer: int, weights: Weights, run: ForwardPass, chosen: Chosen) -> Steps:
        """Compute the rest of it."""
        yield from self._mixture(layer, weights, run, chosen)
        return (yield from self._end(layer, weights, run))

    def _attended(
        self, layer: int, weights: Weights, run: ForwardPass, keep: Sequence[int] | None
    ) -> Steps:
        """Compute a layer up to the end of its attention; returns what that does."""
        self.adapt(layer, run)
        if self._spec.mtp:
            yield from self._with_previous(weights, run)
        if names.POSITIONS in weights:
            yield from self._add_positions(weights, run)
        if self.streams is not None and layer == 0:
            yield from self.streams.split(run, weights)
        if self._per_layer is not None and layer == 0:
            yield from self._per_layer.begin(run, weights)
        if self.streams is not None:
            norm = self._norm_before(layer, weights, "self_attn")
            assert norm is not None
            yield from self.streams.begin(run, weights, norm)
        if not self._spec.has_mixer(layer):
            run.keep(keep)
            return run.input
        attended = yield from self._attend(layer, weights, run, keep)
        return attended if self.streams is None else self.streams.attended(run)

    def _end(self, layer: int, weights: Weights, run: ForwardPass) -> Steps:
        """Compute what follows experts or MLP."""
        if self.streams is not None:
            self.streams.correct(run, weights)
        if self._per_layer is not None:
            residual: Rows | None = "hidden" if self.streams is None else None
            scale = self._layer_scale(layer, weights)
            yield from self._per_layer.end(layer, run, weights, scale, residual)
        if self.streams is not None:
            yield from self.streams.end(layer, run, weights)
        if self._spec.mtp:
            norm = norm_of(self._spec, weights, names.MTP_NORM)
            assert norm is not None
            run.hidden = self._ops.norm(run.input, norm)
        return run.input

    def _with_previous(self, weights: Weights, run: ForwardPass) -> Steps:
        """hidden = proj([norm(hidden); norm(previous)]), of multi-token prediction."""
        assert run.previous is not None
        hidden, norms = run.input, (names.MTP_EMBED_NORM, names.MTP_HIDDEN_NORM)
        both = hidden.new_empty(len(hidden), 2 * self._spec.hidden_size)
        halves = both.chunk(2, dim=1)
        for x, name, half in zip((hidden, run.previous), norms, halves, strict=True):
            norm = norm_of(self._spec, weights, name)
            assert norm is not None
            self._ops.norm(x, norm, out=half)
        return (yield from self._linear(run, weights, names.MTP_PROJ, both, out="hidden"))

    def _add_positions(self, weights: Weights, run: ForwardPass) -> Steps:
        """hidden += the learned embedding of each token's position."""
        assert run.positions is not None
        table, offset = weights[names.POSITIONS], self._spec.position_offset
        if not isinstance(table, TiledMatrix):
            hidden = run.input
            embedding(
                run.positions, cast(QTensor, table), offset=offset, residual=hidden, out=hidden
            )
            return hidden
        rows = run.positions.long() + offset
        for tile in table.tiles:
            some = yield from fetch(run, tile)
            # Those of all tokens, as a GPU would be waited for to know which of them are here.
            at = (rows - tile.first_row).clamp_(0, tile.rows - 1)
            added = embedding(at, some)
            added.masked_fill_((at != rows - tile.first_row)[:, None], 0.0)
            run.input.add_(added.to(run.input.dtype))
        return run.input

    def _attend(
        self, layer: int, weights: Weights, run: ForwardPass, keep: Sequence[int] | None
    ) -> Steps:
        """hidden += attention(norm(hidden)); of a parallel one, return the sum.

        Or what is in its place, or beside it: then both compute before either is added.
        """
        spec, norm = self._spec, self._norm_before(layer, weights, "self_attn")
        beside: Tensor | None = None
        if self._recurrent is not None and spec.is_recurrent(layer):
            going_on = None if spec.attends(layer) else keep
            beside = yield from self._recurrent.steps(layer, run, weights, norm, going_on)
            if not spec.attends(layer):
                return (yield from self._added(layer, run, weights, beside, recurrent=True))
        attended = yield from self._attention.steps(layer, run, weights, norm, keep)
        if beside is not None:
            beside = beside if keep is None else moved_up(beside, keep)
            yield from self._added(layer, run, weights, beside, recurrent=True)
        return (yield from self._added(layer, run, weights, attended))

    def _added(
        self, layer: int, run: ForwardPass, weights: Weights, found: Tensor, recurrent: bool = False
    ) -> Steps:
        """hidden += what attention, or a recurrent layer's op, found, projected: see `_attend`."""
        spec = self._spec
        residual: Rows = "hidden" if run.base is None else run.base
        into = torch.empty_like(run.input) if spec.parallel else residual
        output, scale = ATTENTION_OUT, spec.attention_output_scale
        if recurrent:
            assert spec.recurrent is not None
            output, scale = recurrent_output(spec), spec.recurrent.scale
        end = self._ending(layer, weights, "self_attn", scale)
        return (
            yield from self._linear(
                run, weights, output, found, residual=residual, out=into, end=end
            )
        )

    def _mlp(
        self, layer: int, weights: Weights, run: ForwardPass, attended: Tensor | None
    ) -> Steps:
        """hidden += down(act(gate(norm(hidden))) * up(norm(hidden))), in parts of the tokens.

        attended: of a parallel attention, what the MLP's output is added to in their place.
        """
        count = len(run.input)
        step = self._together(count, weights)
        end = self._ending(layer, weights, "mlp", self._spec.mlp_output_scale)
        norm = self._norm_before(layer, weights, "mlp")
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            inner = yield from self._inner(
                layer, weights, run, "mlp", "hidden", norm, part, self._cuts[layer]
            )
            residual: Rows = "hidden" if attended is None else attended[part]
            yield from self._linear(
                run, weights, "mlp.down_proj", inner,
                residual=residual, out="hidden", end=end, part=part,
            )  # fmt: skip
        return run.input

    def _together(self, count: int, weights: Weights) -> int:
        """Tokens that go through the MLP together."""
        return max(1, mlp_tokens(count, tiled(weights), self._on_gpu))

    def _inner(
        self,
        layer: int,
        weights: Weights,
        run: ForwardPass,
        module: str,
        x: Rows,
        norm: Norm | None,
        part: slice,
        cut: float | None = None,
    ) -> Steps:
        """What goes into the down projection of an MLP; cut: see `DecoderSpec.deviations`."""
        name = f"{module}.gate_up_proj" if self._spec.gated else f"{module}.up_proj"
        out = None
        if module == "mlp":
            assert run.workspace is not None
            out = first_rows(run.workspace.gated, part.stop - part.start)
        if out is not None:
            out = columns(out, cast(QTensor, weights[name]).shape[0] // (1 + self._spec.gated))
        if cut is not None:
            both = yield from self._linear(run, weights, name, x, part=part, norm=norm)
            return self._ops.sparse_gate(both, cut, self._spec.activation, out=out)
        return (
            yield from self._linear(
                run,
                weights,
                name,
                x,
                out=out,
                part=part,
                norm=norm,
                end=self._activation(layer, weights),
            )
        )

    def _activation(self, layer: int, weights: Weights) -> Ending:
        """What follows the first matrix of an MLP."""
        end = self._activations[layer]
        if end.activation == XIELU and layer not in self._xielu:
            numbers = vector(weights, names.XIELU)
            assert numbers is not None
            alpha_p, alpha_n, beta, eps = numbers.cpu().numpy().tolist()
            alphas = _softplus(alpha_p), beta + _softplus(alpha_n)
            self._xielu[layer] = Xielu(*alphas, beta, eps)
        return end if end.activation != XIELU else end._replace(xielu=self._xielu[layer])

    def _parts(self, weights: Weights, run: ForwardPass) -> list[slice]:
        """The tokens that go through experts together."""
        count = len(run.input)
        step = self._together(count, weights)
        return [slice(first, min(first + step, count)) for first in range(0, count, step)]

    def _mixture(
        self, layer: int, weights: Weights, run: ForwardPass, chosen: Chosen | None = None
    ) -> Steps:
        """hidden += the chosen experts' outputs, and the shared one's, or the norm of their sum.

        chosen: of experts that come one by one. Outputs in a narrower space are added up there.
        """
        experts, module = self._experts, "mlp.shared_expert"
        assert experts is not None
        parts, scale = self._parts(weights, run), self._spec.residual_scale
        into = torch.empty_like(run.input) if self._spec.sums_experts else None
        outputs, width = into, self._spec.latent_width
        if width:
            outputs = run.input.new_empty(len(run.input), width)
        inputs: list[Tensor] = []
        if chosen is not None:
            yield from self._streamed_experts(layer, experts, weights, run, chosen, outputs)
            inputs = [choice.routed for choice in chosen.choices]
        for i, part in enumerate(parts):
            sums = None if into is None else into[part]
            found = None if outputs is None else outputs[part]
            if inputs:
                x = inputs[i]
            else:
                x, narrow, scores = yield from self._routed(run, weights, part)
                experts.compute(layer, narrow, scores, weights, run.input[part], found)
            if found is not None and width:
                yield from self._widened(run, weights, part, found, sums)
            if sums is not None and experts.spec.beside:
                yield from self._beside(layer, run, weights, part, sums)
                continue
            if experts.spec.shared_size:
                score = None
                if experts.spec.shared_gate:
                    score = yield from self._exact_linear(run, weights, names.SHARED_GATE, x)
                shared = yield from self._inner(layer, weights, run, module, x, None, part)
                to: Rows = "hidden" if sums is None else sums
                end = Ending(score=score, scale=scale if sums is None else 1.0)
                yield from self._linear(
                    run, weights, f"{module}.down_proj", shared,
                    residual=to, out=to, end=end, part=part,
                )  # fmt: skip
            if sums is not None:
                norm, hidden = norm_of(self._spec, weights, "mlp.post_norm"), run.input[part]
                assert norm is not None
                self._ops.norm(sums, norm, scale=scale, residual=hidden, out=hidden)
        return run.input

    def _widened(
        self, run: ForwardPass, weights: Weights, part: slice, found: Tensor, into: Tensor | None
    ) -> Steps:
        """hidden += what outputs of experts in a narrower space, added up, are projected to.

        into: is that instead.
        """
        residual: Rows | None = "hidden" if into is None else None
        out: Rows = "hidden" if into is None else into
        return (
            yield from self._linear(
                run, weights, names.LATENT_OUT, found, residual=residual, out=out, part=part
            )
        )

    def _routed(
        self, run: ForwardPass, weights: Weights, part: slice
    ) -> Generator[Unit, Weights, tuple[Tensor, Tensor, Tensor]]:
        """What the shared and the chosen experts of some tokens are given, and router's scores."""
        inputs = self._routing_inputs(weights, run.input[part])
        assert inputs is not None
        x, routing = inputs
        scores = yield from self._exact_linear(
            run, weights, names.ROUTER, routing, end=self._of_scores
        )
        if not self._spec.latent_width:
            return x, x, scores
        return x, (yield from self._linear(run, weights, names.LATENT_IN, x, part=part)), scores

    def _routing_inputs(self, weights: Weights, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """What experts are given, which several matrices read, and their router.

        None where the norms of these are not among the weights.
        """
        spec, ops = self._spec, self._exact_ops
        assert spec.experts is not None
        beside = spec.experts.beside
        norm = norm_of(spec, weights, names.ROUTED_NORM if beside else names.BEFORE["mlp"])
        own = norm_of(spec, weights, names.ROUTING_NORM) if beside else norm
        if norm is None or own is None:
            return None
        x = ops.norm(hidden, norm)
        return x, ops.norm(hidden, own, scale=spec.hidden_size**-0.5) if beside else x

    def _beside(
        self, layer: int, run: ForwardPass, weights: Weights, part: slice, experts: Tensor
    ) -> Steps:
        """hidden += norm(norm(MLP) + norm(experts)); experts: what those of some tokens gave."""
        spec, ops = self._spec, self._ops
        norms = (names.DENSE_NORM, names.MIXTURE_NORM, "mlp.post_norm")
        dense, mixture, both = (norm_of(spec, weights, name) for name in norms)
        assert mixture is not None
        assert both is not None
        norm = self._norm_before(layer, weights, "mlp")
        inner = yield from self._inner(layer, weights, run, "mlp", "hidden", norm, part)
        sums = yield from self._linear(
            run, weights, "mlp.down_proj", inner, end=Ending(post_norm=dense), part=part
        )
        ops.norm(experts, mixture, residual=sums, out=sums)
        hidden = run.input[part]
        return ops.norm(
            sums, both, residual=hidden, sum_scale=self._layer_scale(layer, weights), out=hidden
        )

    def _layer_scale(self, layer: int, weights: Weights) -> float:
        """What the layer's output is multiplied by."""
        if layer not in self._scales:
            scale = vector(weights, names.LAYER_SCALE)
            # `float(scale)` is not recorded on a CPU.
            self._scales[layer] = 1.0 if scale is None else scale.cpu().numpy().item()
        return self._scales[layer]

    def _choose(self, weights: Weights, run: ForwardPass) -> Generator[Unit, Weights, Chosen]:
        """The experts that a pass wants of a layer, which come one by one."""
        experts = self._experts
        assert experts is not None
        choices = list[Choice]()
        for part in self._parts(weights, run):
            routed = yield from self._routed(run, weights, part)
            choices.append(experts.choice(*routed, weights, part))
        streamed = cast(StreamedExperts, weights[EXPERTS])
        return Chosen(choices, self._guesses(experts, streamed, run.input[choices[-1].part]))

    def _streamed_experts(
        self,
        layer: int,
        experts: Experts,
        weights: Weights,
        run: ForwardPass,
        chosen: Chosen,
        into: Tensor | None,
    ) -> Steps:
        """hidden += the outputs of experts that come as they were chosen.

        into: in place of the hidden states.
        """
        streamed = cast(StreamedExperts, weights[EXPERTS])
        if run.expert_jobs is not None:
            experts.by_jobs(
                layer, weights, run, chosen.choices, streamed.following, chosen.guesses, into
            )
            return run.input
        guesses = likeliest(streamed.following, chosen.guesses)
        return (
            yield from experts.in_waves(
                layer, weights, run, chosen.choices, guesses, into, streamed.on_cpu
            )
        )

    def _guesses(
        self, experts: Experts, streamed: StreamedExperts, hidden: Tensor
    ) -> Tensor | None:
        """The next layer's experts as its router would choose them now, [M, T] in host memory."""
        given = streamed.guessing
        router = given.get(names.ROUTER)
        if streamed.following is None or not isinstance(router, QTensor):
            return None
        inputs = self._routing_inputs(given, hidden)
        if inputs is None:
            return None
        scores = self._exact_ops.w4_linear(
            inputs[1], router, bias=vector(given, f"{names.ROUTER}.bias"), end=self._of_scores
        )
        return experts.route(scores, given)[0].cpu()

    def _norm_before(self, layer: int, weights: Weights, module: str) -> Norm | None:
        """Of the input of attention or MLP."""
        if not self._spec.norms_before(layer):
            return None
        norm, scale = norm_of(self._spec, weights, names.BEFORE[module]), self._spec.mlp_input_scale
        return norm if norm is None or module != "mlp" else norm._replace(scale=scale)

    def _ending(self, layer: int, weights: Weights, module: str, scale: float) -> Ending:
        """What follows the last projection of attention or MLP; scale: of what that adds."""
        spec = self._spec
        scale *= spec.residual_scale
        after = spec.norms_after(layer)
        if not (after or spec.norm_after_add) and scale == 1:
            return PLAIN
        last = spec.layer_scale and module == "mlp" and spec.per_layer is None
        halved = HALVED if self.streams is not None and module == "self_attn" else 1.0
        return Ending(
            post_norm=norm_of(spec, weights, f"{module}.post_norm") if after else None,
            scale=scale,
            sum_norm=norm_of(spec, weights, names.BEFORE[module]) if spec.norm_after_add else None,
            sum_scale=self._layer_scale(layer, weights) if last else halved,
        )


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
