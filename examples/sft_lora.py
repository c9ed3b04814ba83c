"""Fine-tune a LoRA adapter with TRL's SFTTrainer; --poros streams the frozen base."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import poros

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a local checkpoint with its tokenizer")
parser.add_argument("--output", required=True, help="where the adapter goes")
parser.add_argument("--poros", action="store_true", help="stream the frozen base")
parser.add_argument("--bf16", action="store_true", help="train under bf16 autocast")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seq-len", type=int, default=32)
args = parser.parse_args()

cpu = not torch.cuda.is_available()
torch.manual_seed(0)
quantization = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=torch.bfloat16,
    quantization_config=quantization,
    device_map={"": "cpu" if cpu else 0},
)
model = get_peft_model(
    model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
)
if args.poros:
    model = poros.prepare(model)

rows = torch.randint(3, model.config.vocab_size, (64, args.seq_len)).tolist()
training = SFTConfig(
    output_dir=args.output,
    max_steps=args.steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    max_length=args.seq_len,
    bf16=args.bf16,
    use_cpu=cpu,
    save_strategy="no",
    report_to="none",
)
SFTTrainer(
    model=model,
    args=training,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=AutoTokenizer.from_pretrained(args.model),
).train()
model.save_pretrained(args.output)
