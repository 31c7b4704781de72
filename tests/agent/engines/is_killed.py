import os


class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        os.kill(os.getpid(), 9)


def prepare_server_args(argv):
    return ServerArgs()
