"""The settings: one frozen, documented model per table of the config file.

A setting is documented once, in its `description`, which `--help` prints. Types are strict, unknown keys are
refused, and so are combinations that cannot work: by the table that holds them, or by Config across tables.
`megatron_lrl.config` reads files into these models.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_lrl.settings_adapter import AdapterTable
from megatron_lrl.settings_data import DataTable, EvalTable, LmTable
from megatron_lrl.table import LARGEST_BYTES, MOST_AT_ONCE, MOST_RANKS, Table
from megatron_lrl.table import key as _key


class ModelTable(Table):
    """Which model: exactly one of hf and checkpoint; an override of one replaces the other in the file."""

    hf: str | None = _key(None, "Hugging Face directory (config.json, safetensors, tokenizer)", min_length=1)
    checkpoint: str | None = _key(
        None, "Megatron distributed checkpoint written by `import` or `train`", min_length=1
    )
    dtype: Literal["float32", "bfloat16", "float64"] = _key(
        "float32", "parameters and compute; float64 is for numerical checks"
    )
    residual_dtype: Literal["model", "float32"] = _key(
        "model",
        'the residual stream between layers and pipeline stages: "model": in model.dtype; "float32": the layers of a '
        "bfloat16 model add up in float32, in sampling and replay alike, which brings the two closer together, for "
        "more saved bytes; no weights change, and nothing changes under float32",
    )
    same_bits: Literal["off", "auto", "on"] = _key(
        "off",
        "whether a token's forward gives the same bits in any company, so that the trainer's log-probability of a "
        "sampled token is the sampler's own number: \"on\" probes this machine's kernels at start and refuses where "
        'they depend on the rows beside, "auto" goes without there; needs softmax attention, and tp <= 2 for mixtures',
    )
    max_positions: int | None = _key(
        None,
        "tokens of a sequence that are allowed beyond the model's own positions; RoPE goes on as it is, which the "
        "model was not trained for; unset = the model's own",
        ge=1,
    )
    attention: Literal["full", "lastkv"] = _key(
        "full", "full causal attention, or LastKV: last-layer keys and values for all completed chunks"
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelTable:
        if self.hf is not None and self.checkpoint is not None:
            raise ValueError("model.hf and model.checkpoint are both set; set exactly one of them")
        return self

    @model_validator(mode="after")
    def _residual_is_not_narrowed(self) -> ModelTable:
        if self.residual_dtype == "float32" and self.dtype == "float64":
            raise ValueError(
                'model.residual_dtype = "float32" would round a float64 model between its layers; valid: "model"'
            )
        return self


class LastKVTable(Table):
    """LastKV attention, read when model.attention = "lastkv". A property of the model."""

    chunk_size: int = _key(512, "C, tokens per LastKV chunk", ge=1)
    blend: bool = _key(True, "blend own-layer and last-layer keys and values of the previous chunk")
    gate_init: float = _key(0.1, "alpha of the blend at initialisation, per layer and KV head", gt=0, lt=1)


class ParallelTable(Table):
    """The layout. dp = world / (tp cp pp)."""

    tp: int = _key(
        1,
        "tensor parallel size; must divide the attention heads, KV heads, MLP and expert widths",
        ge=1,
        le=MOST_RANKS,
    )
    cp: int = _key(
        1,
        "context parallel size: resident state and new tokens are sharded over it; tp x cp must divide the heads of "
        "Gated DeltaNet",
        ge=1,
        le=MOST_RANKS,
    )
    pp: int = _key(1, "pipeline parallel size; must divide the layers", ge=1, le=MOST_RANKS)
    ep: int = _key(
        1,
        "expert parallel size, taken from the cp ranks and then from dp, so it adds no ranks; must divide the experts "
        "and world / (tp pp); 1 for dense models",
        ge=1,
        le=MOST_RANKS,
    )
    sequence_parallel: bool = Field(
        default_factory=lambda data: data.get("tp", 1) > 1,
        description="shard norms and residuals over tp; on by default whenever tp > 1; experts need it there",
    )

    @model_validator(mode="after")
    def _sequence_parallel_needs_tp(self) -> ParallelTable:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("parallel.sequence_parallel = true needs parallel.tp > 1; leave the key out")
        return self


class PrefixTable(Table):
    """The shared prompt: how it is captured and which gradient it gives."""

    contract: Literal["conventional", "response_only", "exact", "truncated"] = _key(
        "exact",
        "conventional: full graph per response; response_only: prompt state constant; exact: adds the "
        "prompt's gradient chunk by chunk; truncated: exact for the newest truncate_tokens prefix tokens",
    )
    chunk_size: int = _key(2048, "Z, tokens captured at once; execution only, never changes results", ge=1)
    truncate_tokens: int = _key(8192, 'T, live prefix tokens under contract = "truncated"', ge=0)
    max_staleness: int = _key(
        0,
        "updates that a captured prefix may outlive: 0 = every update captures anew; n needs "
        'contract = "response_only", and logs the drift of log-probabilities against a fresh capture',
        ge=0,
    )
    measure_omitted_every: int = _key(
        0,
        "> 0: every so many updates the window is also accumulated under exact, and the gradient that "
        "response_only or truncated omits is logged (omitted/*); no update changes. 0 = never",
        ge=0,
    )
    keep_graph_bytes: int = _key(
        0,
        "bytes of saved tensors that the capture may keep, so that the newest chunks need no second forward in "
        "the exact sweep; needs parallel.pp = 1, no effect under LastKV; execution only, never changes results",
        ge=0,
        le=LARGEST_BYTES,
    )
    snapshot_bytes: int = _key(
        0,
        "bytes per rank for what only the exact sweep restarts from: recurrent states (Gated DeltaNet) before each "
        "captured chunk, own-layer keys and values (LastKV) of each LastKV chunk; with fewer restarts the chunks "
        "between them run forward once more; 0 = no limit; execution only, never changes results",
        ge=0,
        le=LARGEST_BYTES,
    )

    @model_validator(mode="after")
    def _stale_prefixes_are_constant(self) -> PrefixTable:
        if self.max_staleness and self.contract != "response_only":
            raise ValueError(
                f'prefix.max_staleness = {self.max_staleness} needs prefix.contract = "response_only": the prefix\'s '
                f'own gradient ("{self.contract}") belongs to the model that captured it'
            )
        return self


class ReplayTable(Table):
    """Replaying responses against the resident prefix; all but use_recorded_routing never change results."""

    concurrent: int = _key(1, "K, responses replayed at once; a group with fewer replays all of them", ge=1)
    chunk_size: int = _key(
        0,
        "a response longer than this many tokens is fed in chunks and swept back through them, one chunk's graph "
        "alive at a time; 0: one graph a response",
        ge=0,
    )
    share_tokens: int = _key(
        64,
        "responses that share at least this many tokens beyond the prompt take them together (not under conventional); "
        "0: never",
        ge=0,
    )
    logits_chunk: int = _key(
        0,
        "response tokens whose logits exist at once; 0 = as many as fit a budget of 128 MiB for a rank's logits",
        ge=0,
    )
    check_poison: bool = _key(False, "fill freed state with NaN, so that a stale read fails loudly")
    use_recorded_routing: bool = _key(
        False,
        "score and replay with the experts and weights recorded with each response; gradients reach the current "
        "router through its own scores. Needs responses with a record (rollout.record_routing)",
    )


class RolloutTable(Table):
    """Where responses come from, and sampling."""

    source: Literal["builtin", "file"] = _key(
        "builtin",
        "builtin: the trainer samples from data.prompts; file: it takes groups that anything recorded (agents, another "
        "engine) from rollout.trajectories, train.groups_per_update each update, in the order of the file",
    )
    trajectories: str | None = _key(
        None,
        'JSONL file of groups for source = "file": token ids, rewards or advantages, log-probabilities, masks',
    )
    max_staleness: int = _key(
        0,
        'how many updates may lie between the policy that sampled a group of that file (its "version", default 0) '
        "and the one that trains on it; an older group is refused before the first update",
        ge=0,
    )
    group_size: int = _key(8, f"G, responses per prompt, at most {MOST_AT_ONCE}", ge=1, le=MOST_AT_ONCE)
    max_new_tokens: int = _key(
        128, "longest response, in tokens; shorter when an end-of-sequence token comes", ge=1
    )
    temperature: float = _key(
        1.0, "the policy is softmax(logits / temperature), in sampling and in the loss", gt=0
    )
    top_p: float = _key(
        1.0, "nucleus sampling; below 1 the sampler's distribution differs from the policy's", gt=0, le=1
    )
    seed: int = _key(0, "seed of the sampler", ge=0)
    decode_bytes: int = _key(
        2**30,
        "bytes per rank that responses which decode together may take for their own tokens, at their longest (and for "
        "prompts that are resident for sampling alone); groups that do not fit wait; execution only, never changes "
        "results",
        ge=1,
        le=LARGEST_BYTES,
    )
    record_routing: bool = _key(
        False,
        "record the experts and weights of every response token and layer with the response; replay then measures how "
        "often the trainer routes differently (routing/*)",
    )


class MoETable(Table):
    """Balancing of experts. Routing is part of the policy, so both are off unless asked for."""

    router_bias_update_rate: float = _key(
        0.0,
        "step of the routers' bias with each update, towards an even load of the window's response tokens; models with "
        "such a bias (GLM-4.5 to 4.7). 0 = the bias stays",
        ge=0,
    )
    aux_loss_coef: float = _key(
        0.0,
        "weight of the sequence-wise load-balancing loss (mean over the window's responses, sum over layers) that is "
        "added to the gradient. 0 = none",
        ge=0,
    )


class LossTable(Table):
    """The objective."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = _key(
        "grpo",
        "grpo: (r - mean) / (std + 1e-6), population std; dr_grpo: r - mean; rloo: r - mean of the others",
    )
    objective: Literal["clipped", "gspo", "cispo"] = _key(
        "clipped",
        "clipped: PPO's surrogate, token by token; gspo: the same with the response's mean ratio (clip by about 3e-4); "
        "cispo: the clipped ratio, held constant, times the log-probability (every token keeps its gradient)",
    )
    clip_low: float = _key(0.2, "the ratio is clipped below at 1 - clip_low", ge=0, le=1)
    clip_high: float = _key(0.2, "the ratio is clipped above at 1 + clip_high", ge=0)
    kl_coef: float = _key(
        0.0, "weight of the k3 KL against the reference, the model as first loaded; 0 = none", ge=0
    )
    aggregate: Literal["token", "sequence"] = _key(
        "token",
        "token: sum over the window's response tokens / their number; sequence: mean of responses' means",
    )
    importance_cap: float = _key(
        0.0,
        "> 0: old log-probabilities are recomputed by replay, and each token weighs min(old / sampler "
        "probability, cap); 0 = off: old log-probabilities are the sampler's",
        ge=0,
    )


# TOML has arrays only; under strict typing they do not become tuples by themselves.
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class OptimizerTable(Table):
    """AdamW and its learning rate."""

    lr: float = _key(1e-6, "learning rate after warm-up", gt=0, le=1e3)
    betas: Pair = _key((0.9, 0.95), "decay rates of the two moments, each in [0, 1)")
    eps: float = _key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = _key(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = _key(1.0, "largest global gradient norm; 0 = no clipping", ge=0)
    warmup_updates: int = _key(0, "updates of linear warm-up from 0; less than train.updates", ge=0)
    decay: Literal["constant", "linear", "cosine"] = _key("constant", "from lr to min_lr at train.updates")
    min_lr: float = _key(0.0, "learning rate at the end of the decay", ge=0)

    @model_validator(mode="after")
    def _ranges(self) -> OptimizerTable:
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas = {list(self.betas)}: each must be at least 0 and below 1")
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr = {self.min_lr:g} must not exceed optimizer.lr = {self.lr:g}")
        return self


class TrainTable(Table):
    """The run. `train` resumes from the newest checkpoint in output if that folder holds the same run."""

    objective: Literal["grpo", "lm"] = _key(
        "grpo",
        "grpo: reinforcement learning on data.prompts; lm: next-token training on lm.data, with the same model, "
        "checkpoints and tracking (LastKV uptraining)",
    )
    updates: int = _key(20, "updates of the whole run, those before a resume included", ge=1)
    groups_per_update: int = _key(
        1, f"prompts per update over all dp ranks, at most {MOST_AT_ONCE}", ge=1, le=MOST_AT_ONCE
    )
    max_seconds: float = _key(
        0.0,
        "seconds of wall time that the process may take: the run saves and stops before the update that would pass "
        "them, with room for the longest update and checkpoint so far; the same command goes on. 0 = no limit",
        ge=0,
    )
    save_every: int = _key(10, "updates between checkpoints; 0 = only at the end", ge=0)
    output: str | None = _key(
        None, "folder of the run: checkpoints, TensorBoard, metrics.jsonl", min_length=1
    )
    overwrite: bool = _key(False, "start anew and replace the run that output holds, instead of resuming it")
    changed_inputs: Literal["refuse", "accept"] = _key(
        "refuse",
        "what a resume does when data.prompts, lm.data or the files of model.hf or model.checkpoint have other content "
        "than the run began with: name them and stop, or go on with what is there",
    )
    seed: int = _key(0, "seed of everything but the sampler", ge=0)
    log_samples: int = _key(2, "sampled responses logged as text per update", ge=0)
    window_attempts: int = _key(
        2,
        "attempts at an update before a run of one rank stops: the window starts over from its recorded responses; "
        "several ranks end, and the launcher's restart (torchrun --max-restarts) resumes from checkpoint and journal",
        ge=1,
    )
    on_nonfinite: Literal["stop", "skip"] = _key(
        "stop",
        "what a NaN or infinite loss or gradient does: stop the run, or skip the update's step; both say where",
    )


class Config(Table):
    """All settings of a run."""

    model: ModelTable = Field(default_factory=ModelTable)
    adapter: AdapterTable = Field(default_factory=AdapterTable)
    lastkv: LastKVTable = Field(default_factory=LastKVTable)
    parallel: ParallelTable = Field(default_factory=ParallelTable)
    prefix: PrefixTable = Field(default_factory=PrefixTable)
    replay: ReplayTable = Field(default_factory=ReplayTable)
    rollout: RolloutTable = Field(default_factory=RolloutTable)
    moe: MoETable = Field(default_factory=MoETable)
    loss: LossTable = Field(default_factory=LossTable)
    optimizer: OptimizerTable = Field(default_factory=OptimizerTable)
    train: TrainTable = Field(default_factory=TrainTable)
    lm: LmTable = Field(default_factory=LmTable)
    data: DataTable = Field(default_factory=DataTable)
    eval: EvalTable = Field(default_factory=EvalTable)

    @model_validator(mode="after")
    def _across_tables(self) -> Config:
        if self.model.hf is None and self.model.checkpoint is None:
            raise ValueError("no model: set model.hf or model.checkpoint to a directory")
        if self.prefix.keep_graph_bytes and self.parallel.pp > 1:
            raise ValueError(
                f"prefix.keep_graph_bytes = {self.prefix.keep_graph_bytes} needs parallel.pp = 1, not "
                f"{self.parallel.pp}: a pipeline passes gradients between stages only within one schedule; valid: 0"
            )
        if self.adapter.on and self.moe.router_bias_update_rate:
            raise ValueError(
                "moe.router_bias_update_rate moves the base, which is frozen under [adapter]; valid: 0"
            )
        if self.optimizer.warmup_updates >= self.train.updates:
            raise ValueError(
                f"optimizer.warmup_updates = {self.optimizer.warmup_updates} must be less than "
                f"train.updates = {self.train.updates}"
            )
        return self
