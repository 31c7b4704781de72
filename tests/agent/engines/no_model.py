class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        raise OSError("/m has no config.json")


def prepare_server_args(argv):
    return ServerArgs()
