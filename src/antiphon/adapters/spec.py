"""What an adapter says of itself, and the options that its model is loaded with.

The loader knows adapters by these values and never by name. Neither this module nor one that exports a `SPEC` imports
a library that computes: a spec names the class of its model, which is imported when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from antiphon.engine.api import Capabilities, EngineSettings
from antiphon.remote.engine import EngineServers
from antiphon.roles import ModelRole, role_named

NO_CAPABILITIES = Capabilities(0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One adapter. Each folder of `adapters/` exports one as `SPEC`."""

    # The role that its model fills, and so the contract of its class (`roles.py`); another name of a role
    # (`OTHER_NAMES`) stands for the role.
    role: ModelRole
    # The class, as "module:Class". It is called as Class(folder, model_id, options) with the options that `runs_on`
    # says, waits until the model is loaded, and raises ModelError where it does not load. A reader, whose weights are
    # inside a library, is called as Class(options).
    model: str
    # "engine" for a model that an engine steps, which is loaded with EngineModelOptions and has a method `close`;
    # "lane" for one that keeps nothing on the device between calls, which is loaded with LaneModelOptions and has an
    # attribute `lane`.
    runs_on: Literal["engine", "lane"]
    # What the model needs of its engine. The loader refuses an engine that has less.
    requires: Capabilities = NO_CAPABILITIES
    # The types, `model_type` in config.json, of the checkpoints that this adapter loads from folders of the user's;
    # None: it loads no such folders. A checkpoint of a type that no adapter of the role names goes to the first adapter
    # of the role that loads folders, whose error says what it expects.
    model_types: tuple[str, ...] | None = None
    # A function that converts the model's files before they are loaded, as "module:function"; "": they are loaded as
    # they are. It is called as prepare(source, home, name, weights, device), where `source` is the files' folder or a
    # .gguf file, and `home` the folder that models are kept in. It returns the folder to load, may take minutes, and
    # raises StoreError.
    prepare: str = ""
    # Roles whose models are loaded before this one and given to its class, as keyword arguments of these names,
    # which may be other names of the roles; None for a role that has no model.
    uses: tuple[ModelRole, ...] = ()
    # The models of the registry with this adapter are voices, whose ids are ADAPTER-VOICE. The further voices that the
    # settings name are given to the class as `voices`, a mapping from model ids to folders.
    takes_voices: bool = False
    # The settings may name a second model with this adapter, which decodes partials. Its folder is given to the class
    # as `partials`.
    takes_partials: bool = False
    # The model is a NativeModel, which takes turns by itself.
    native: bool = False
    # The extra of the package that has what the model's class imports beside the base; "": nothing.
    extra: str = "talk"
    # The attribute of a conversation model that is a LanguageModel, and stands in where the settings name none; "":
    # there is none.
    language_model: str = ""

    def __post_init__(self) -> None:
        """Take another name of the role for the role. Raises ValueError for what is no role."""
        object.__setattr__(self, "role", role_named(self.role))


@dataclass(frozen=True, slots=True)
class EngineModelOptions:
    """How a model is loaded that an engine steps. The same value serves all of them; each reads what concerns it.

    - `settings`: the memory and the step sizes of each engine that the model starts.
    - `device`: "cpu", "cuda" or "cuda:1".
    - `weights`: "auto", "int8", "bf16" or "fp32".
    - `threads`: of the CPU's products; 0: one for each core that this process may use.
    - `observe`: called in the model's thread after each step with its rows, its sessions and the seconds it took.
    - `talker_device`: the device of a conversation model's separate talker; "": the model's.
    - `prefill`: when a video model takes frames into its KV: "eager", as they come, or "query", with a question.
    - `servers`: the servers that compute a language model, whose folder then has a configuration and a tokenizer and
      needs no weights; None: it is computed here.
    """

    settings: EngineSettings = field(default_factory=EngineSettings)
    device: str = "cpu"
    weights: str = "auto"
    threads: int = 0
    observe: Callable[[int, int, float], None] | None = None
    talker_device: str = ""
    prefill: str = "eager"
    servers: EngineServers | None = None


@dataclass(frozen=True, slots=True)
class LaneModelOptions:
    """How a model is loaded that works in a lane. The same value serves all of them; each reads what concerns it.

    - `device`: "cpu", "cuda" or "cuda:1".
    - `compute_type`: the numeric type of CTranslate2's weights, as it names them.
    - `workers`: threads that may compute at once. A model whose jobs are short has one, whatever is given.
    - `max_queue`: jobs that may wait in the lane; more are refused. A model whose jobs are short may allow more.
    - `observe`: called in a worker's thread after each batch with its priority, the seconds that its oldest job waited,
      and the seconds that it took.
    """

    device: str = "cpu"
    compute_type: str = "int8"
    workers: int = 1
    max_queue: int = 256
    observe: Callable[[int, float, float], None] | None = None
