"""Reading checkpoints: safetensors directories and GGUF files, tensor by tensor, to the device."""
