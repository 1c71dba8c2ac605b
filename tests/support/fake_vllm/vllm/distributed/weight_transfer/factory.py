class WeightTransferEngineFactory:
    registry: dict = {}

    @classmethod
    def register_engine(cls, name, engine):
        assert name not in cls.registry
        cls.registry[name] = engine

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return cls.registry[config.backend](config, vllm_config, device, model)
