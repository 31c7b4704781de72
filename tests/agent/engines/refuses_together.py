class ServerArgs:
    tp_size = 8

    def __init__(self):
        self.page_size = 1

    def resolve_once(self):
        self.page_size = 64

    def check_server_args(self):
        assert self.page_size < 64, "page_size goes not with the rest"


def prepare_server_args(argv):
    return ServerArgs()
