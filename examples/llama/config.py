"""What a run is: frozen dataclasses, whose fields are the flags of the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


class UserError(Exception):
    """Something the user can mend: shown as one line, without a traceback."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model."""

    vocab_size: int = 32_000
    """Words in the embedding and in the head; at least those of the tokenizer."""
    context: int = 256
    """Tokens the model sees at once."""
    layers: int = 8
    """Transformer blocks."""
    width: int = 512
    """Size of the residual stream."""
    heads: int = 8
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, shared by groups of query heads. None: as many as query heads."""
    mlp_width: int = 1376
    """Hidden size of the SwiGLU."""
    rope_theta: float = 10_000.0
    """Longest period of the rotary embedding is 2 pi times this."""
    norm_eps: float = 1e-6
    """Added to the mean square inside RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of every initial matrix."""
    base_width: int | None = None
    """Width at which `init_std` and the learning rates were tuned: at another one, initial blocks
    and logits are scaled as muP asks. None: no scaling."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def shrink(self) -> float:
        """What muP multiplies logits by, and the variance of initial blocks."""
        return (self.base_width or self.width) / self.width


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    path: str | None = None
    """Text, JSON lines or parquet, a file or a folder; hf:NAME:CONFIG for a data set of the Hugging
    Face hub; a folder made by prepare.py. None: the documentation of the Python that runs this."""
    text_field: str = "text"
    """The field of JSON lines and parquet that holds the text."""
    cache: Path = Path("runs/.cache")
    """Where text is kept once tokenized."""
    tokenizer: Path | None = None
    """A tokenizer.json of the `tokenizers` library. None: train one on the text."""
    packing: Literal["concat", "pad"] = "concat"
    """concat: documents one after another, cut into contexts. pad: a document a sequence."""
    held_out: float = 0.05
    """Fraction of the documents held out, chosen by a hash of their names."""
    eval_tokens: int = 200_000
    """At most this many held-out tokens are evaluated, the same ones each time."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; one of them may be -1, which takes the rest."""

    data: int = -1
    """Copies of the model, each with its part of the batch."""
    fsdp: int = 1
    """Parts that parameters and optimizer state are split into; these split the batch too."""
    tensor: int = 1
    """Parts that each matrix multiplication is split into."""


@dataclass(frozen=True)
class HostsConfig:
    """Several processes that train one model."""

    coordinator: str | None = None
    """host:port of the first process; auto where jax finds it (TPU pods, SLURM). None: alone."""
    count: int | None = None
    """Number of processes, where jax does not find it."""
    index: int | None = None
    """Number of this process, from 0."""
    timeout: float = 60.0
    """Seconds to wait for the other processes, at the start and to write a checkpoint."""


@dataclass(frozen=True)
class Config:
    """Train a LLaMA with Nora, or with one of its peers."""

    preset: str = "tiny"
    """Defaults to start from: tiny, 60m, 135m, 350m or 1b."""
    config: Path | None = None
    """A YAML or JSON file of these fields, such as the config.json of a run; flags go before it."""
    name: str | None = None
    """The run is written to OUT/NAME. None: optimizer and time of day."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Go on from the last checkpoint of this run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)

    optimizer: str = "nora"
    """nora, adamw, sgd, muon, rmnp, mano, sso, adamp or sgdp."""
    learning_rate: float | None = None
    """Peak learning rate of matrices. None: what suits the optimizer."""
    adam_learning_rate: float | None = None
    """Peak learning rate of everything else (AdamW). None: what suits the optimizer."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices. None: 0 for Nora, 0.1 for its peers, as in the paper."""
    momentum: float | None = None
    """Look-ahead weight of Nora and its kin; 1 is none. None: the optimizer's own."""
    block_rows: int = 1
    """Rows of a matrix that Nora makes orthonormal together; 1: each by itself, as in the paper."""
    project: bool = True
    """Take from Nora's steps what lies along the weights, as in the paper."""
    row_scale: Literal["fan_ratio", "unit", "width", "rms"] | None = None
    """How long the step of a row is, given its matrix's shape. None: the optimizer's own."""
    base_fan_in: int | None = None
    """Fan-in at which the learning rate was tuned, for `row_scale` width."""
    fused: bool = True
    """Let the optimizer write the parameters itself where it can, Nora on a GPU by kernels."""
    clip: float = 1.0
    """Gradients longer than this, all leaves taken together, are shortened to it."""
    warmup: int = 1_000
    """Steps of linear warm-up; after it a cosine to `final_fraction` of the peak."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a fraction of its peak."""

    steps: int = 10_000
    """Optimizer steps."""
    batch: int = 512
    """Sequences in an optimizer step, over all devices."""
    micro_batch: int | None = None
    """Sequences a device holds at once; gradients are summed up to `batch`. None: all of them."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""

    precision: Literal["auto", "float32", "mixed", "bfloat16_master", "bfloat16"] = "auto"
    """mixed: float32 parameters, bfloat16 compute. bfloat16_master: bfloat16 parameters, of which
    the optimizer holds float32 copies. bfloat16: no copies. auto: float32 on CPU, else mixed."""
    scan_layers: bool = False
    """Stack the blocks and scan over them: one compile whatever the depth."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass computes anew: nothing, all but matrix products, or all of a block."""
    loss_chunk: int = 4_096
    """Tokens of a device whose logits are held at once."""

    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 1_000
    """Steps between evaluations on held-out text."""
    geometry_every: int = 0
    """Steps between measurements of the rows of every matrix. 0: never."""
    save_every: int = 1_000
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Checkpoints kept."""
    tensorboard: bool = False
    """Write event files for TensorBoard too; needs the extra `tensorboard`."""
    prompt: str = "The "
    """Beginning of the sample that is generated at the end."""


PRESETS: dict[str, Config] = {
    "tiny": Config(
        model=ModelConfig(
            vocab_size=2048, context=128, layers=4, width=128, heads=4, mlp_width=344
        ),
        adam_learning_rate=0.01,
        steps=600,
        batch=16,
        warmup=60,
        eval_every=100,
        save_every=300,
        geometry_every=50,
    ),
    "60m": Config(preset="60m"),
    "135m": Config(
        preset="135m",
        model=ModelConfig(layers=12, width=768, heads=12, mlp_width=2048),
        steps=20_000,
        warmup=2_000,
    ),
    "350m": Config(
        preset="350m",
        model=ModelConfig(layers=16, width=1024, heads=16, mlp_width=2816),
        steps=60_000,
        warmup=6_000,
    ),
    "1b": Config(
        preset="1b",
        model=ModelConfig(layers=24, width=2048, heads=32, mlp_width=5461),
        steps=100_000,
        warmup=10_000,
        scan_layers=True,
        remat="dots",
    ),
}
