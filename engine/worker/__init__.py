"""What owns a device: KV memory, input batch, graphs, model runner, profile."""
