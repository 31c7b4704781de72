import torch


class ServerArgs:
    def __init__(self):
        self.tp_size = 8

    def resolve_once(self):
        try:
            self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        except Exception as error:
            raise ValueError("no SMs") from error


def prepare_server_args(argv):
    return ServerArgs()
