import torch


class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        torch.cuda.init()


def prepare_server_args(argv):
    return ServerArgs()
