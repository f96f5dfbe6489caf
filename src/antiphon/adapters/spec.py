"""The spec of an adapter, and the options with which its model is loaded.

The loader selects adapters by their specs, never by name. Neither this module nor a module that exports a `SPEC`
imports a numeric library: a spec names the class of its model, which is imported when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from antiphon.engine.api import Capabilities, EngineSettings
from antiphon.modeling.gathered import Tick
from antiphon.remote.engine import EngineServers
from antiphon.roles import ModelRole, role_named

NO_CAPABILITIES = Capabilities(0)


@dataclass(frozen=True, slots=True)
class Spec:
    """The description of one adapter. Each folder of `adapters/` exports one as `SPEC`."""

    # The role of the model, which also names the contract that its class implements (`roles.py`). An alias of the role
    # (`OTHER_NAMES`) is accepted.
    role: ModelRole
    # The model's class, as "module:Class". The loader calls Class(folder, model_id, options) with the options that
    # `runs_on` implies. The constructor returns when the model is loaded, and raises ModelError if it cannot load it.
    # The class of an image reader, whose library contains the weights, is called as Class(options).
    model: str
    # "engine": an engine steps the model. It is loaded with EngineModelOptions and has a `close` method.
    # "lane": the model keeps nothing on the device between calls. It is loaded with LaneModelOptions and has a `lane`
    # attribute.
    runs_on: Literal["engine", "lane"]
    # The capabilities that the model needs. The loader refuses an engine that lacks one of them.
    requires: Capabilities = NO_CAPABILITIES
    # The checkpoint types (`model_type` in config.json) that this adapter loads from the user's folders. None: it loads
    # no such folders. If no adapter of the role lists a checkpoint's type, the first adapter of the role that loads
    # folders tries to load it, and its error message names the expected kind of checkpoint.
    model_types: tuple[str, ...] | None = None
    # The pattern of the file names by which a folder without config.json is recognized as a model of this adapter. "":
    # its folders have a config.json.
    files: str = ""
    # For such folders: a function, as "module:function", that is called with the folder, computes nothing, and returns
    # what the folder is, in words, and why it does not load, or "".
    describe: str = ""
    # A function, as "module:function", that converts the model's files before they are loaded. "": no conversion. It is
    # called as prepare(source, home, name, weights, device): `source` is the folder of the files or a .gguf file, and
    # `home` is the folder in which models are stored. The function returns the folder to load, may take minutes, and
    # may raise StoreError.
    prepare: str = ""
    # Roles whose models are loaded before this one. They are passed to the class as keyword arguments with these names,
    # which may be aliases of the roles. A role without a model is passed as None.
    uses: tuple[ModelRole, ...] = ()
    # True if the registry's models with this adapter are voices, whose ids have the form ADAPTER-VOICE. Additional
    # voices from the settings are passed to the class as `voices`, a mapping from model ids to folders.
    takes_voices: bool = False
    # True if the settings may name a second model with this adapter, which decodes partials. Its folder is passed to
    # the class as `partials`.
    takes_partials: bool = False
    # True if the model is a NativeModel, which decides by itself when to speak.
    native: bool = False
    # The extra of the Python package that installs the dependencies of the model's class. "": no additional
    # dependencies.
    extra: str = "talk"
    # The attribute of a conversation model that is a LanguageModel. It is used if the settings name no language model.
    # "": no such attribute.
    language_model: str = ""

    def __post_init__(self) -> None:
        """Replace an alias of a role by the role.

        Raises:
            ValueError: `role` is neither a role nor an alias of one.
        """
        object.__setattr__(self, "role", role_named(self.role))


@dataclass(frozen=True, slots=True)
class EngineModelOptions:
    """Load options of models that an engine steps. All of them get the same value; each reads the fields it needs."""

    # The memory and the step sizes of each engine that the model starts.
    settings: EngineSettings = field(default_factory=EngineSettings)
    # "cpu", "cuda", or a numbered device such as "cuda:1".
    device: str = "cpu"
    # "auto", "int8", "bf16" or "fp32".
    weights: str = "auto"
    # CPU threads for matrix products. 0: one for each core that this process may use.
    threads: int = 0
    # Called in the model's thread after each step, with the step's rows, its sessions and its duration in seconds.
    observe: Callable[[int, int, float], None] | None = None
    # The device of a conversation model's separate talker. "": the same as `device`.
    talker_device: str = ""
    # When a video model computes the KV of frames: "eager", as they arrive, or "query", with the next question.
    prefill: str = "eager"
    # Seconds for which a partial transcript or a unit of a native conversation may wait for those of other sessions, to
    # share passes with them. None: the model's own value on a GPU, 0 on a CPU.
    gather_s: float | None = None
    # The number of steps in which a native model's vocoder turns noise into sound. Fewer are faster, and sound worse.
    flow_steps: int = 10
    # The servers that compute a language model. Its folder then needs a configuration and a tokenizer, but no weights.
    # None: the model is computed in this process.
    servers: EngineServers | None = None

    def tick(self, on_gpu_s: float) -> Tick:
        """Return the tick that gathers the requests of a model's sessions. `on_gpu_s`: its interval on a GPU."""
        return Tick(self.gather_s if self.gather_s is not None else 0.0 if self.device == "cpu" else on_gpu_s)


@dataclass(frozen=True, slots=True)
class LaneModelOptions:
    """Load options of models that run in a lane. All of them get the same value; each reads the fields it needs."""

    # "cpu", "cuda", or a numbered device such as "cuda:1".
    device: str = "cpu"
    # The `compute_type` of CTranslate2 models.
    compute_type: str = "int8"
    # Threads that may compute at the same time. A model with short jobs ignores it and uses one.
    workers: int = 1
    # Limit of queued jobs; further jobs are refused. A model with short jobs may allow more.
    max_queue: int = 256
    # Called in a worker's thread after each batch, with the batch's priority, the seconds that its oldest job waited,
    # and its duration in seconds.
    observe: Callable[[int, float, float], None] | None = None
