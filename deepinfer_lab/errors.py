"""Every error that a user can cause. Each message names the offending value and what is allowed."""


class DeepInferError(Exception):
    """Base of all errors raised on purpose by this package."""


class ModelNotFound(DeepInferError):
    """A model name, folder or hub id that leads nowhere."""


class CheckpointError(DeepInferError):
    """A model file that is missing, truncated, or does not hold what its format promises."""


class ChecksumError(CheckpointError):
    """A downloaded file whose SHA-256 is not the published one."""


class UnsupportedArchitecture(DeepInferError):
    """A checkpoint of a model family, or with a feature, that the decoder does not implement."""


class CacheFull(DeepInferError):
    """The disk that holds the model cache lacks the space for a download."""


class DownloadError(DeepInferError):
    """A model could not be fetched: no network, no such package, or the transfer broke off."""


class ChatError(DeepInferError):
    """Chat messages that the model's template refuses, or a model that has no chat template."""


class QuantisationError(DeepInferError):
    """A weight that a few-bit layout cannot hold: wrong bits, group, rank or K."""


class KernelError(DeepInferError):
    """A shape, dtype or device that a CUDA kernel cannot take, or a kernel that does not compile."""


class AdmissionError(DeepInferError):
    """A request that the engine refuses before it costs anything. `reason` is its counter's name."""

    reason = "refused"


class EmptyPrompt(AdmissionError):
    reason = "empty_prompt"


class ContextOverflow(AdmissionError):
    reason = "context_overflow"


class PoolOverflow(AdmissionError):
    reason = "pool_overflow"


class DuplicateRequest(AdmissionError):
    reason = "duplicate_request"


class InvalidSampling(AdmissionError):
    reason = "invalid_sampling"


class InvalidToken(AdmissionError):
    reason = "invalid_token"


class RequestFailed(DeepInferError):
    """A request that the engine had to give up. All others go on."""


class NonFiniteLogits(RequestFailed):
    """The model's output holds NaN or infinity, so that no token can be chosen."""


class OutOfDeviceMemory(RequestFailed):
    """The device lacks the memory for this request's next step, even alone."""


class EngineClosed(DeepInferError):
    """The engine was closed, or its thread died, while a request was in it."""


class SettingError(DeepInferError):
    """An option (policy, mode, device, size) with a value that is not allowed."""


class RecordError(DeepInferError):
    """A record that is missing, malformed, or was measured with other parameters than those asked for."""


class NotebookError(DeepInferError):
    """An unknown notebook, an unknown notebook parameter, or a notebook that failed while running."""


class ClusterError(DeepInferError):
    """A Dask cluster without an answer or a worker, or with a worker that cannot run this package's cells."""


class MissingDependency(DeepInferError):
    """An optional package is needed for what was asked. The message says how to install it."""
