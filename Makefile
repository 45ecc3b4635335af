# `make` lists the targets. On a machine with its own python and no network: make test-gpu PYTHON=python3

PYTHON ?= .venv/bin/python
# Torch is pinned without a hash, since its build depends on the machine: the resolver takes a CPU build of this version (2.13.0+cpu) where the
# package source has one, and else the build for CUDA, with gigabytes of NVIDIA packages and its own Triton. Another source, and only that:
# make TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
# Versions and hashes of everything else in .venv, pip, setuptools and Triton included. `make LOCK= venv` takes the newest ones that setup.py
# allows, `make lock` renews the file.
LOCK ?= requirements-dev.txt
# Triton of the interpreter's tests; uv cannot resolve it together with torch's build for CUDA, which requires an older one.
TRITON = triton==3.9.0
EXTRAS = dev plot docs notebook
comma := ,

# Only the default interpreter is ours to make.
READY := $(if $(filter .venv/bin/python,$(PYTHON)),.venv/.installed)
PYTEST = $(PYTHON) -m pytest --durations=10
# Tests without a GPU run in one process more than there are cores, one thread each: some wait for processes that they started, for ranks
# that wait for each other, or for a timeout. A file's tests stay in one process, for what they share.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile
# Which part of the nightly tests, of how many.
SHARD ?= 1/1
# So that an interpreter of the machine, into which nothing was installed, finds us too.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Compiled files are kept, whatever the caller's environment says: each test process would compile all of them anew.
unexport PYTHONDONTWRITEBYTECODE
LINTED = msamp megatron tools tests docs examples setup.py
# Tests that need the extra `integrations`: by host, and of our file for a host.
HOST_TESTS = tests/integrations $(addprefix tests/msamp/integrations/test_,accelerate.py lightning.py transformers.py)
# Files with tests of what the extras `eval` and `wandb` bring. Here and in hosts `--extras` leaves out the tests that `make test` has run.
EXTRA_TESTS = tests/megatron/lm/evaluation tests/megatron/lm/tools/test_evaluate.py \
  tests/megatron/lm/tools/convert/test_fp8_export.py \
  tests/megatron/lm/run/reports/test_weights_and_biases.py

# The other end of the ranges in setup.py, which a newer Python allows: the newest torch and megatron-core, and the tests that meet them.
NEWEST_PYTHON ?= $(or $(lastword $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12.*/bin/python3))),python3.12)
NEWEST_TESTS = $(addprefix tests/megatron/lm/,model data training checkpoint config/test_megatron_flags.py) \
  tests/attack/test_foreign_checkpoints.py $(wildcard tests/msamp/integrations/test_initialize*.py) tests/msamp/integrations/test_fsdp.py \
  tests/msamp/optim/test_capturable_updates.py
# Files in these folders on our own arithmetic and layouts, which `make test` runs: other files there call the same functions of both packages.
NEWEST_WITHOUT = $(addprefix --ignore=tests/megatron/lm/,checkpoint/files checkpoint/test_levels.py \
  checkpoint/test_saving_two_ranks.py model/test_attention_precision.py model/test_first_last_bf16.py model/test_narrow_options.py \
  model/test_smooth_swiglu.py training/test_fp8_guard.py training/test_skipped_on_grids.py)
# Other versions of megatron-core, whose checkpoints are read (tests/megatron/lm/checkpoint/foreign/test_torch_dist.py).
OTHER_CORES = 0.17.1 0.18.2

.PHONY: help venv environments quickstart test test-hosts test-newest test-extras test-nightly test-gpu test-multi-gpu soak fuzz lint lock audit wheel dist docs tables bench bench-gate clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

venv: $(READY) ## make .venv and install everything into it

# editable_mode=compat puts this folder itself on the path: `megatron` stays a namespace shared with NVIDIA's wheel, and the
# scripts in tools/ find each other.
.venv/.installed: setup.py pyproject.toml $(LOCK)
	python3 -m venv .venv
ifneq ($(LOCK),)
	.venv/bin/python -m pip install --no-deps --require-hashes -r $(LOCK)
	.venv/bin/python -m pip install $(TORCH)
	.venv/bin/python -m pip install --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	.venv/bin/python -m pip check
else
	.venv/bin/python -m pip install --upgrade 'pip>=24' 'setuptools>=77'
	.venv/bin/python -m pip install $(TORCH)
	.venv/bin/python -m pip install --config-settings editable_mode=compat -e '.[$(subst $( ) $( ),$(comma),$(EXTRAS))]'
endif
	@touch $@

# A layer of its own over .venv: the torchvision of PyPI is built for CUDA, and beside a CPU build of torch it does not load, nor do then
# transformers and timm, which import it (tests/helpers/hosts.py helps them).
.venv-hosts/.installed: setup.py .venv/.installed
	python3 -m venv --without-pip .venv-hosts
	.venv/bin/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$(.venv-hosts/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	.venv/bin/python -c 'from importlib.metadata import requires; print(*(r.partition(";")[0] for r in requires("msamp") \
	  if "integrations" in r), sep="\n")' > .venv-hosts/requirements.txt
	.venv/bin/python -m pip --python .venv-hosts/bin/python install $(TORCH) -r .venv-hosts/requirements.txt
	@touch $@

# Another layer of its own: lm-eval brings many packages, some of them in versions that the trainer does not want.
.venv-extras/.installed: setup.py .venv/.installed
	python3 -m venv --without-pip .venv-extras
	.venv/bin/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$(.venv-extras/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	.venv/bin/python -c 'from importlib.metadata import requires; print(*(r.partition(";")[0] for r in requires("msamp") \
	  if "\"eval\"" in r or "\"wandb\"" in r), sep="\n")' > .venv-extras/requirements.txt
	.venv/bin/python -m pip --python .venv-extras/bin/python install $(TORCH) -r .venv-extras/requirements.txt
	@touch $@

# Torch's build for CUDA where the package source has no other: 5 GB.
.venv-newest/.installed: setup.py .venv/.installed
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv/bin/python -c 'from importlib.metadata import requires; print(*(r.partition(";")[0] for r in requires("msamp") \
	  if "extra" not in r or "\"dev\"" in r), sep="\n")' > .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install -r .venv-newest/requirements.txt
	for version in $(OTHER_CORES); do .venv-newest/bin/python -m pip install --quiet --no-deps --upgrade \
	  --target .venv-newest/megatron-core/$$version megatron-core==$$version || exit 1; done
	@touch $@

environments: .venv-hosts/.installed .venv-extras/.installed .venv-newest/.installed ## make the environments of test-hosts, test-extras and test-newest

quickstart: $(READY) ## train a small GPT in BF16 and at O2 on this machine, compare them (ARGS=... for more flags)
	$(PYTHON) -m megatron.lm.command.quickstart $(ARGS)

test: $(READY) ## every test that needs no GPU, but for the nightly ones (JOBS=n in n processes)
	$(PARALLEL) -m "not gpu and not multi_gpu and not nightly" tests $(ARGS)

test-hosts: override PYTHON = .venv-hosts/bin/python
test-hosts: .venv-hosts/.installed ## the tests in transformers, accelerate, peft, Lightning, timm, torchvision, TRL and diffusers, which it installs
	REQUIRE_HOSTS=1 $(PARALLEL) --extras $(HOST_TESTS) $(ARGS)

test-newest: override PYTHON = .venv-newest/bin/python
test-newest: .venv-newest/.installed ## tests of model, data, training and checkpoints on Python 3.12 with the newest torch and megatron-core
	REQUIRE_HOSTS=1 $(PARALLEL) -m "not gpu and not multi_gpu and not nightly" $(NEWEST_TESTS) $(NEWEST_WITHOUT) $(ARGS)

test-extras: override PYTHON = .venv-extras/bin/python
test-extras: .venv-extras/.installed ## the tests of evaluation by lm-eval and of wandb, with the extras `eval` and `wandb`, which it installs
	REQUIRE_HOSTS=1 $(PARALLEL) -m "not gpu" --extras $(EXTRA_TESTS) $(ARGS)

test-nightly: $(READY) ## the longer tests that need no GPU: all, or with SHARD=1/4 a fourth (each at most an hour on 2 cores)
	$(PARALLEL) -m "nightly and not gpu and not multi_gpu" --shard $(SHARD) tests $(ARGS)

test-gpu: $(READY) ## tests on one GPU with FP8
	$(PYTEST) -m "gpu and not multi_gpu" tests $(ARGS)

test-multi-gpu: $(READY) ## tests on two or more GPUs: four start their processes at a time, one at a time has the GPUs, for at most 90 s
	OMP_NUM_THREADS=1 $(PYTEST) -v -n 4 --dist worksteal -m multi_gpu $$(grep -rl mark.multi_gpu tests --include='test_*.py') $(ARGS)

soak: $(READY) ## kill small trainings 100 times at random moments, and see that nothing is lost (half an hour)
	$(PYTHON) tools/soak.py $(ARGS)

fuzz: $(READY) ## 3,000 damaged and forged checkpoints and files: each is refused in a line, and nothing gets out
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests:$(PYTHONPATH) $(PYTHON) -m attack.fuzz $(ARGS)

lint: $(READY) ## ruff, mypy, the direction of imports, and no marks of a merge conflict
	! git grep -nE '^(<{7}|>{7}) '
	$(PYTHON) -m ruff check $(LINTED)
	$(PYTHON) -m ruff format --check $(LINTED)
	$(PYTHON) -m mypy msamp megatron/lm tools
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

define START_WHEEL
$(PYTHON) -m pip install --quiet --no-deps --target build/installed dist/msamp-*.whl
cd build/installed && PYTHONPATH=. bin/msamp pretrain --help >/dev/null
endef

wheel: $(READY) ## build dist/msamp-*.whl, and see that it starts by itself, without this folder
	rm -rf build dist
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(START_WHEEL)
	rm -rf build

dist: $(READY) ## build dist/msamp-*.tar.gz, from it dist/msamp-*.whl, which must start by itself, and the bill of materials (CycloneDX)
	rm -rf build dist
	$(PYTHON) -m build --no-isolation --outdir dist .
	$(START_WHEEL)
	python3 -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet cyclonedx-bom==7.5.0
	(cat requirements-dev.txt; echo $(firstword $(TORCH))) | build/sbom/bin/cyclonedx-py requirements --output-reproducible \
	  --spec-version 1.6 --output-file "$$(ls dist/*.tar.gz | sed 's/.tar.gz$$/.cdx.json/')" -
	rm -rf build
	@ls -l dist

# uv, since it resolves for every supported Python at once; in an environment of its own, since nothing else needs it. Torch and the CUDA
# packages of its build are left to $(TORCH). Markers that all lines share (`[tool.uv]` in pyproject.toml) are cut.
UV = build/uv/bin/uv pip compile --universal --python-version 3.11 --no-annotate --generate-hashes --quiet
COMMON = (python_full_version < '3.14' and )?implementation_name.*sys_platform == 'linux'
lock: ## renew requirements-dev.txt: the newest versions that setup.py allows (ARGS='--upgrade-package ruff' for one)
	python3 -m venv build/uv
	build/uv/bin/python -m pip install --quiet uv==0.13.9
	printf 'pip\nsetuptools\nmegatron-core<0.17\n' > build/tools.in  # one version for all Pythons; test-newest has the newest
	cp requirements-dev.txt build/lock
	$(UV) setup.py build/tools.in $(addprefix --extra ,$(EXTRAS)) --no-emit-package torch --no-emit-package triton \
	  --custom-compile-command 'make lock' $(or $(ARGS),--upgrade) --output-file build/lock > /dev/null
	echo '$(TRITON)' | $(UV) - --no-header >> build/lock
	awk '/^[a-z#]/ {skip = /^(cuda|nvidia)-/} !skip' build/lock \
	  | sed -E "s/$(COMMON)//; s/ (and|;) +\\\\$$/ \\\\/" > requirements-dev.txt
	rm -rf build

audit: ## compare the lock file with the databases of known vulnerabilities, if one can be reached
	python3 -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit==2.10.1
	build/audit/bin/pip-audit --require-hashes --disable-pip -r requirements-dev.txt $(ARGS) 2>&1 | tee build/audit/report
	@! grep -q "could not be audited" build/audit/report || echo "NOT AUDITED: no database of vulnerabilities could be reached"
	@! grep -Eq "^Found [0-9]+ known" build/audit/report
	@rm -rf build

docs: $(READY) ## build the documentation, docs/_build/html/index.html; a warning or a dead internal link is an error
	$(PYTHON) -m sphinx -W --keep-going -n -q -b html -d docs/_build/doctrees docs docs/_build/html $(ARGS)

tables: $(READY) ## tables and figures of README and documentation from the measured rows (ARGS=--check: only say what is stale)
	$(PYTHON) tools/tables.py $(ARGS)

bench: $(READY) ## step time of GPT-1.3B at O0 to O3 on this GPU
	$(PYTHON) tools/bench/bench_step.py $(ARGS)

bench-gate: $(READY) ## fail if one of six ratios of step times to BF16 or torchao grew by more than 3 % on this GPU (ARGS=--write records them)
	$(PYTHON) tools/bench/speed_gate.py $(ARGS)

clean: ## remove .venv, caches and build output; data/ and runs/ stay
	rm -rf .venv .venv-hosts .venv-extras .venv-newest build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
