import os
import sys


class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        sys.stderr.write("Segmentation fault\n"), sys.stderr.flush(), os._exit(3)


def prepare_server_args(argv):
    return ServerArgs()
