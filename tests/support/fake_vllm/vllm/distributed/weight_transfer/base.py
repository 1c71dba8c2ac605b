"""The shape of vLLM 0.32's base class, where vLLM is not installed. The same contract tests run with the real one."""


class WeightTransferInitInfo: ...


class WeightTransferUpdateInfo: ...


class WeightTransferEngine:
    def __init__(self, config, vllm_config, device, model):
        self.device, self.model = device, model

    def parse_init_info(self, result):
        return self.init_info_cls(**result)

    def parse_update_info(self, result):
        return self.update_info_cls(**result)
