import argparse
import dataclasses


@dataclasses.dataclass
class ServerArgs:
    tp_size: int = 1
    page_size: int = None

    def __post_init__(self):
        self.page_size = 64


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--page-size", type=int)
    return ServerArgs(**vars(parser.parse_args(argv)))
