# Two commands do everything on a fresh machine with Python 3.11 or newer: `make train` and `make test`.
PYTHON ?= python3
OUT ?= output
RANKS ?= 8
GPUS ?= 1
TORCH ?= torch==2.13.0+cpu
VENV ?= .venv
BIN := $(VENV)/bin
PEERS ?= .venv-peers/deepspeed
STAMP := $(VENV)/.ready
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CPU_INDEX := https://download.pytorch.org/whl/cpu
ROOMS := engine parallel models launch
TRAIN ?= --model tiny --data stdlib --tp 2 --pp 2 --dp 2 --zero 1 --steps 120 --seq 128 \
	--per_device_train_batch_size 8 --microbatches 2 --learning_rate 4e-3 --warmup_ratio 0.1 \
	--eval_steps 40 --logging_steps 10 --save_strategy steps

export OMP_NUM_THREADS ?= 1

.PHONY: help set-up train test test-pure test-full frozen gpu-check crash-test check format bench peers view clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

set-up: $(STAMP)  ## make .venv with everything in it, once

$(STAMP): setup.py constraints.txt
	@echo "set-up: making $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PIP) '$(TORCH)' 2> $(VENV)/torch.log || { \
		case '$(TORCH)' in *+cpu) ;; *) cat $(VENV)/torch.log >&2; exit 1;; esac; \
		echo "set-up: no $(TORCH) where pip looks; asking PyTorch's own index of CPU builds"; \
		$(PIP) --index-url $(CPU_INDEX) --retries 1 --timeout 15 '$(TORCH)' 2> $(VENV)/torch.log || { \
			echo "set-up: it does not answer; taking PyPI's $(TORCH:+cpu=), on Linux some gigabytes, CUDA included"; \
			$(PIP) '$(TORCH:+cpu=)'; }; }
	@$(PIP) -e '.[dev]'
	@touch $@

train: $(STAMP)  ## train a small model on 8 ranks (2 × 2 × 2); metrics, picture and a sample in output/
	@$(BIN)/triaxis run -n $(RANKS) $(TRAIN) --output-dir $(OUT) || { \
		code=$$?; test $$code != 2 || echo "another folder: make train OUT=FOLDER" >&2; exit $$code; }
	@echo "what it writes:" && $(BIN)/triaxis generate $(OUT) --prompt "def " --tokens 200

test: check  ## lint, format, types and all tests
	@$(BIN)/python -m pytest -n auto --dist worksteal

test-pure: $(STAMP)  ## the tests that need no torch, in seconds
	@$(BIN)/python -m pytest -q tests/pure

test-full: check  ## the same, with every layout instead of a sample
	@TRIAXIS_FULL=1 $(BIN)/python -m pytest -n auto --dist worksteal

frozen: $(STAMP)  ## what every layout does, compared with what was recorded (two minutes)
	@$(BIN)/python -m tests.frozen compare tests/frozen/record.json

gpu-check: $(STAMP)  ## what this machine's GPUs do, in minutes; GPUS=2 or 8 for more of them
	@$(BIN)/python -m tests.gpu --gpus $(GPUS) --json $(OUT)/gpu-check.json

crash-test: $(STAMP)  ## kill a training 50 times at random moments; it must end as if nothing had happened
	@$(BIN)/python -m tests.crash

check: $(STAMP) view  ## lint, format and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary

format: $(STAMP)  ## put every file into the one format
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

bench: $(STAMP)  ## speed and memory against the peers that are installed
	@$(BIN)/python benchmarks/run.py

peers: $(PEERS)/.with-peers  ## DeepSpeed and Accelerate, to compare with, in an environment of their own

$(PEERS)/.with-peers:
	@$(MAKE) -s VENV=$(PEERS) set-up
	@DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		ninja 'deepspeed==0.19.8' accelerate
	@touch $@

view:  ## .view/triaxis/<folder> links, for type checkers and editors
	@mkdir -p .view/triaxis
	@for room in $(ROOMS); do ln -sfn ../../$$room .view/triaxis/$$room; done

clean:  ## remove what was made, but not .venv
	@rm -rf .view .mypy_cache .ruff_cache .hypothesis output bench-output build
