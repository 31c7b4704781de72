import argparse


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size")
    parser.add_argument("--page-size")
    return parser.parse_args(argv)
