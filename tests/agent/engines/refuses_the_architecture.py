class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        raise ValueError("TRTLLM MLA is\n for Blackwell")


def prepare_server_args(argv):
    return ServerArgs()
