import argparse
import dataclasses
import logging

import torch


@dataclasses.dataclass
class Graph:
    max_bs: int = 8


class ServerArgs:
    __struct_fields__ = ("tp_size", "page_size", "backend", "sm", "graph", "_explicit")
    __struct_defaults__ = (1, None, "auto", 0, None, False)

    def resolve_once(self):
        logging.getLogger("sglang.srt.arg_groups.kv").warning("\033[1;33mpage size\n becomes 64\033[0m")
        major, minor = torch.cuda.get_device_capability()
        self.decided = {"page_size": 64, "backend": "trtllm", "sm": 10 * major + minor, "graph": Graph()}

    def resolved_dict(self):
        return {name: self.decided.get(name, getattr(self, name)) for name in self.__struct_fields__}


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--page-size", type=int)
    logging.basicConfig(force=True)
    args = ServerArgs()
    vars(args).update(backend="auto", sm=0, graph=None, _explicit=True, **vars(parser.parse_args(argv)))
    print("SGLang says things on its standard output, too")
    return args
