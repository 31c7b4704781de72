"""PyTorch's ways to CUDA, as far as SGLang takes them. None may be gone."""


class Cuda:
    class OutOfMemoryError(RuntimeError):
        pass

    @staticmethod
    def _lazy_init():
        raise SystemExit("a context was made")

    @staticmethod
    def get_device_capability(device=None):
        cuda._lazy_init()

    @staticmethod
    def get_device_properties(device=None):
        cuda._lazy_init()

    @staticmethod
    def init():
        cuda._lazy_init()


cuda = Cuda
