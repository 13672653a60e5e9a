"""What other programs' configurations come to here: DeepSpeed, the Hugging Face Trainer, FSDP and Accelerate."""
