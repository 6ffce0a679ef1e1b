"""Log-probs of completions under the policy and the reference, in packs or in padded rows."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gruppo.algo.kl import k1
from gruppo.algo.mismatch import importance_weights
from gruppo.errors import ConfigError
from gruppo.policy.adapters import reference_policy
from gruppo.policy.head import Scores
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import sampling_mode
from gruppo.policy.packing import PackedRows, Packer, idle_pack
from gruppo.policy.routing import Routing
from gruppo.policy.sharding import reshard
from gruppo.policy.unwrap import bare_model
from gruppo.rollout.hf import TransformersBackend
from gruppo.trainer.books.metrics import ratio_metrics
from gruppo.trainer.feeding import Feeding
from gruppo.trainer.processes.collectives import gather_rows
from gruppo.types import TrainBatch

T = TypeVar("T")
LogpsAndLoss = tuple[Tensor, Tensor | None, Tensor | None]  # log-probs, entropies, load-balancing loss


class LogProbs(Feeding):
    """The part of the trainer that computes log-probs of given completions."""

    # ---- log-probs

    def add_logps(self, batch: TrainBatch) -> Tensor | None:
        """Add log-probs under the sampling weights and the reference to the batch, where the recipe needs them.

        Returns the KL penalty of each completion of all processes, for recipes that subtract it from the reward.
        """
        return self._retry_smaller(lambda: self._add_logps(batch))

    def _retry_smaller(self, run: Callable[[], T]) -> T:
        """Call `run` and return its result, retrying with smaller packs if memory runs out."""
        while self.packed is not None and not self.sharding.is_sharded:  # sharded: all processes share each pass
            try:
                return run()
            except torch.OutOfMemoryError:
                pass
            self.planner.shrink()  # not in the handler: the traceback keeps tensors that must be freed
        return run()

    def _add_logps(self, batch: TrainBatch) -> Tensor | None:
        off_policy = self.mode == "train" and not self.args.rollouts_stay_on_policy
        off_policy |= self.corrects_sampler
        has_reference = self.recipe.kl != "none"  # whatever the current value of beta
        charge_kl = self.recipe.kl == "reward"
        if not (off_policy or has_reference):
            return None
        # The KL compares two passes of the same kind, so that it is exactly 0 where the policies are equal.
        known_BT = batch.engine_logps if self.parity.reuses_engine_logps and not charge_kl else None
        packs = self._packs(batch) if has_reference or known_BT is None else None
        if off_policy or charge_kl:
            old_BT = self._frozen_logps(self.model, batch, packs) if known_BT is None else known_BT
        if off_policy and self.recipe.ratio == "sequence_sum":
            batch.old_logps = (old_BT * batch.loss_mask_BT).sum(1)
        elif off_policy:
            batch.old_per_token_logps = old_BT
        if self.corrects_sampler:
            self._weigh_samples(batch, old_BT)
        if charge_kl:
            return self._kl_in_reward(batch, k1(old_BT, self._reference_logps(batch, packs)))
        if has_reference:
            batch.ref_per_token_logps = self._reference_logps(batch, packs)
        return None

    def _check_parity(self, batch: TrainBatch) -> None:
        """Compare packed rows with padded ones, or padded rows with single ones; see `ParityGuard`, `PaddingGuard`."""
        model = bare_model(self.accelerator, self.model)
        backend = self.backend if self.custom_rollout is None else None
        sampler = backend.logps_of if isinstance(backend, TransformersBackend) else None
        with self.presence.during("checking parity"):
            self.padding.check(model, batch, sampler, rows=self._forward_rows)
        if self.padding.alone and isinstance(self.backend, TransformersBackend):
            self.backend.padding.alone = True  # what was compared
        if self.mode == "train":
            self.parity.check(
                model,
                batch,
                self.state.global_step,
                temperature=self.temperature,
                entropy_gradient=self.entropy_control.enabled,
            )

    @property
    def corrects_sampler(self) -> bool:
        """Whether tokens are weighted by the ratio of their probabilities under the policy and the sampler."""
        return bool(self.args.samples_with_vllm and self.args.vllm_importance_sampling_correction)

    def _weigh_samples(self, batch: TrainBatch, old_BT: Tensor) -> None:
        """Add ρ = π_old / π_sampler, bounded as configured, to the batch, and log it."""
        args, weights = self.args, None
        if batch.sampling_per_token_logps is not None:  # a rollout function may not return them
            weights = importance_weights(
                old_BT,
                batch.sampling_per_token_logps,
                batch.loss_mask_BT,
                args.vllm_importance_sampling_mode,
                args.vllm_importance_sampling_clip_min,
                args.vllm_importance_sampling_clip_max,
            )
        batch.importance_sampling_ratio = weights
        self.metrics.add(self.mode, *ratio_metrics(self.accelerator, weights, batch.loss_mask_BT))

    def _kl_in_reward(self, batch: TrainBatch, log_ratio_BT: Tensor) -> Tensor:
        """The KL estimate Σ_t (ℓ_old − ℓ_ref) of each completion of all processes; logs its mean per token."""
        kl_B = (log_ratio_BT * batch.loss_mask_BT).sum(1)
        batch.kl_penalty = self.beta * kl_B
        local = torch.stack([kl_B.sum(), batch.loss_mask_BT.sum().to(kl_B)])
        total, tokens = self.accelerator.reduce(local, reduction="sum").tolist()
        self.metrics.add(self.mode, {"kl": total / max(tokens, 1)}, of=tokens)
        return gather_rows(self.accelerator, batch.kl_penalty)

    def _logps_of(self, model: nn.Module, batch: TrainBatch, **options: Any) -> LogpsAndLoss:
        """Log-probs and (with `compute_entropy`) entropies of the completions, (B, T) each.

        With `compute_aux_loss`, also the load-balancing loss.
        """
        if batch.vision is not None:
            options["vision"] = batch.vision
        logps_BT, entropy_BT, *further = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch.prompt_ids, batch.completion_ids], 1),
            torch.cat([batch.prompt_mask, batch.completion_mask], 1),
            batch.completion_ids.shape[1],
            **options,
        )
        aux_loss = further[0] if further else None
        if options.get("compute_aux_loss") and aux_loss is None:
            raise ConfigError(
                f"{type(self).__name__}._get_per_token_logps_and_entropies returned no auxiliary loss as its third "
                f"value, but router_aux_loss_coef is {self.router_aux_loss_coef}. Return it, or set that to 0."
            )
        return logps_BT, entropy_BT, aux_loss

    def _frozen_logps(self, model: nn.Module, batch: TrainBatch, packs: Sequence[PackedRows] | None) -> Tensor:
        """Log-probs in evaluation mode: the distribution that was sampled from, without dropout."""
        bare = bare_model(self.accelerator, model) if model is self.model else model
        with sampling_mode(model), self.presence.during("computing log-probs"):
            if packs is None:
                return self._logps_of(bare, batch, batch_size=self._forward_rows)[0]
            return self._logps_of_packs(bare, batch, packs)[0]

    def _reference_logps(self, batch: TrainBatch, packs: Sequence[PackedRows] | None) -> Tensor:
        if self.ref_model is not None:
            return self._frozen_logps(self.ref_model, batch, packs)
        with reference_policy(bare_model(self.accelerator, self.model)):
            return self._frozen_logps(self.model, batch, packs)

    def _packs(self, batch: TrainBatch) -> list[PackedRows] | None:
        """The rows that have loss tokens, packed; None if rows are padded."""
        if self.packed is None:
            return None
        rows = batch.loss_mask_BT.any(1).nonzero()[:, 0].tolist()
        plan = self.planner.plan(batch)
        return Packer(batch).packs(rows, plan.tokens, plan.group_tokens)

    def _passes_in_step(self, passes: int) -> int:
        """The passes to make: with sharded weights, which every pass gathers, the maximum over all processes."""
        if not self.sharding.is_sharded:
            return passes
        return int(self.accelerator.gather(torch.tensor([passes], device=self.accelerator.device)).max())

    def _idle(self, model: nn.Module, passes: int) -> None:
        """Make empty passes in which other processes need this one; with autograd enabled, their gradients are 0."""
        assert self.packed is not None
        for _ in range(passes):
            scores = self.packed.score(model, idle_pack(self.accelerator.device))
            if torch.is_grad_enabled():
                self.accelerator.backward(scores.logps.sum() * 0.0)
        if self.sharding.is_sharded and not torch.is_grad_enabled():
            reshard(model)

    def _whole_packs(self, batch: TrainBatch) -> list[PackedRows]:
        """All rows, packed with every token: those that the load-balancing loss of a router is about."""
        plan = self.planner.plan(batch)
        return Packer(batch, whole=True).packs(range(len(batch)), plan.tokens, plan.group_tokens)

    def _logps_of_packs(
        self, model: nn.Module, batch: TrainBatch, packs: Sequence[PackedRows], entropy: bool = False
    ) -> LogpsAndLoss:
        """Log-probs and entropies (B, T) of a packed batch; 0 where there is no loss token.

        For packs of whole rows, also the load-balancing loss.
        """
        assert self.packed is not None
        idle = self._passes_in_step(len(packs)) - len(packs)
        with self.timer("_get_per_token_logps_and_entropies"), self.packed.active(model):
            found = [self._logps_of_pack(model, pack, entropy=entropy) for pack in packs]
            self._idle(model, idle)
        scores, routings = [score for score, _ in found], [routing for _, routing in found if routing is not None]
        router_loss = sum(routings[1:], routings[0]).loss() if routings else None

        def placed(values: list[Tensor]) -> Tensor:
            out = torch.zeros(batch.completion_ids.shape, device=batch.completion_ids.device)
            for pack, value in zip(packs, values, strict=True):
                out = out.to(value.dtype).index_copy(0, pack.row_index, pack.padded(value))
            return out

        entropies = [score.entropies for score in scores if score.entropies is not None]
        return placed([score.logps for score in scores]), placed(entropies) if entropy else None, router_loss

    def _logps_of_pack(self, model: nn.Module, pack: PackedRows, **options: Any) -> tuple[Scores, Routing | None]:
        """Scores of a pack; for a pack of whole rows, also the routing of their tokens to experts."""
        assert self.packed is not None
        if pack.repeats is None:
            return self.packed.score(model, pack, temperature=self.temperature, **options), None
        return self.packed.score_routed(model, pack, temperature=self.temperature, **options)

    @property
    def _forward_rows(self) -> int:
        """Rows per forward pass outside the update."""
        args = self.args
        return args.per_device_train_batch_size if self.mode == "train" else args.per_device_eval_batch_size

    def _only_vision(self, given: dict[str, Any], input_ids: Tensor) -> Any:
        """The `vision` argument; raises if an overridden hook omits it or passes image tensors instead.

        The rows would otherwise be run without their images.
        """
        vision, others = given.get("vision"), {name for name, value in given.items() if value is not None} - {"vision"}
        if vision is None and not self.prompt_encoder.takes_images:
            return None
        tokens = torch.tensor(sorted(self.prompt_encoder.placeholders), device=input_ids.device)
        said = f" (it passed {', '.join(sorted(others))})" if others else ""
        if others or (vision is None and torch.isin(input_ids, tokens).any()):
            raise ConfigError(
                f"{type(self).__name__} scores rows with images, but did not pass on their image data{said}: call "
                "_get_per_token_logps_and_entropies with vision=inputs['vision'], one entry for each row."
            )
        return vision

    # ---- a hook of TRL's trainers: name and shapes are theirs

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> LogpsAndLoss:
        """Hook: log-probs (B, T), entropies (B, T) or None, load-balancing loss (0-d) or None.

        `vision` is a list with one entry per row: the processor's output for its prompt.
        """
        if self.padding.alone and isinstance(model, DistributedDataParallel):
            model.broadcast_buffers = False  # in every pass, of which a process has as many as rows with a gradient
        options: dict[str, Any] = {
            "vision": self._only_vision(multimodal, input_ids),
            "temperature": self.temperature,
            "batch_size": 1 if self.padding.alone else batch_size,
            "trim": bool(self.padding.layers),
            "entropy": compute_entropy,
            "entropy_gradient": self.entropy_control.enabled,
            "router_loss": compute_aux_loss,
        }
        with self.timer("_get_per_token_logps_and_entropies"):
            return score_tokens(model, input_ids, attention_mask, logits_to_keep, **options)
