import torch


class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


def prepare_server_args(argv):
    return ServerArgs()
