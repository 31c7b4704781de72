class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        raise OSError(28, "No space left on device")


def prepare_server_args(argv):
    return ServerArgs()
