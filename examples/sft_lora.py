"""LoRA with SFTTrainer: sft_lora.py MODEL DATA OUTPUT, a {"text": ...} in each line of DATA."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import poros

path, data, output = sys.argv[1:]
nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
cpu = not torch.cuda.is_available()
torch.manual_seed(0)

with poros.deterministic():  # so that a GPU, too, gives the same bits twice
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4)
    model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.1, target_modules="all-linear"))
    model = poros.prepare(model)  # the line; without it, the same adapter from a resident base
    training = SFTConfig(
        output, max_steps=20, per_device_train_batch_size=1, bf16=True, use_cpu=cpu
    )
    SFTTrainer(model, training, train_dataset=Dataset.from_json(data)).train()
model.save_pretrained(output)
