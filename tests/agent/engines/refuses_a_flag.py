import argparse


def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--tp-size")
    parser.add_argument("--page-size-a")
    parser.add_argument("--page-size-b")
    return parser.parse_args(argv)
