"""Deliberate breaks of one line each, and the tests that must notice: how strong the suite is.

    python tests/mutants.py            # all of them, `make test-mutants`; minutes
    python tests/mutants.py trainer    # those whose file, texts or test have this word

The tree is copied, so the checkout stays as it is. A break is caught if its tests fail. One that
passes is a fault of the suite; one whose old text is gone, or whose tests fail without it too, is
one of this list: after a change of the code give the entry its new text. Both exit with 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("configs", "lra", "models", "results", "scripts", "tests", "run.py", "pyproject.toml",
          "README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")  # fmt: skip
TIMEOUT_S = 600


class Mutant(NamedTuple):
    """One break: `old`, which stands once in `file`, becomes `new`; `test` of tests/ must fail."""

    file: str
    old: str
    new: str
    test: str  # file, and ::name or a part of names after a blank

    @property
    def words(self) -> list[str]:
        """The test as arguments of pytest."""
        file, _, part = self.test.partition(" ")
        return [f"tests/{file}", *(["-k", part] if part else [])]


MUTANTS = [
    # Data: caches, batches, order.
    Mutant("lra/tasks/cache.py", '(folder / "meta.json").stat()', "folder.stat()",
           "tasks/test_data.py without_its_meta"),
    Mutant("lra/tasks/cache.py",
           "shutil.rmtree(folder, ignore_errors=True)  # a cache without", "#",
           "tasks/test_data.py without_its_meta"),
    Mutant("lra/tasks/cache.py", 'return memo_dir / "fingerprints", own',
           'return Path.home() / "fingerprints", own', "tasks/test_data.py cache_lies_where"),
    Mutant("lra/tasks/cache.py", "with contextlib.suppress(OSError):  # a ready cache",
           "with contextlib.nullcontext():  # a ready cache",
           "tasks/test_data.py nothing_can_be_written"),
    Mutant("lra/tasks/cache.py", '"max_length": task.max_length,\n        "source"', '"source"',
           "tasks/test_data.py changed_setting"),
    Mutant("lra/tasks/cache.py", "return cache_dir / f", "return task.data_dir / f",
           "tasks/test_data.py cache_lies_where"),
    Mutant("lra/tasks/batches.py", "self.sequence(index, s), 1,", "self.sequence(index, s), 0,",
           "tasks/test_data.py ids_above_the_padding"),
    Mutant("lra/tasks/batches.py", "order = order[: num_batches * batch_size]",
           "order = order[: (num_batches - 1) * batch_size]", "tasks/test_data.py permutation"),
    Mutant("lra/tasks/batches.py",
           "np.random.default_rng([seed, epoch])", "np.random.default_rng([seed])",
           "tasks/test_data.py permutation"),
    Mutant("lra/tasks/batches.py", "epoch, batches[(step - 1) %", "epoch, batches[step %",
           "tasks/test_data.py where_they_left_off"),
    Mutant("lra/tasks/batches.py", "np.argsort(-lengths, kind=\"stable\")",
           "np.argsort(-lengths, kind=\"stable\")[: len(lengths) // batch_size * batch_size]",
           "tasks/test_data.py evaluation_covers"),
    Mutant("lra/tasks/batches.py", "values[: self.max_length]", "values[-self.max_length :]",
           "tasks/test_text.py cut"),
    # Training: steps, the best, resuming, gradients.
    Mutant("lra/training/trainer.py", "best_accuracy: float = -1.0", "best_accuracy: float = 0.0",
           "training/test_trainer.py first_evaluation"),
    Mutant("lra/training/trainer.py", "else val.accuracy > self.best_accuracy",
           "else val.accuracy > self.best_accuracy and self.curve[1:]",
           "training/test_trainer.py first_evaluation"),
    Mutant("lra/training/trainer.py", "else val.accuracy > self.best_accuracy",
           "else val.accuracy >= self.best_accuracy", "training/test_trainer.py chosen_step"),
    Mutant("lra/training/gradient.py", "losses_B.sum() / num_answers", "losses_B.mean()",
           "training/test_trainer.py micro_batches"),
    Mutant("lra/training/trainer.py", "first_step=state.step + 1,", "first_step=state.step or 1,",
           "training/test_trainer.py killed_run_repeats"),
    Mutant("lra/training/trainer.py", 'optimizer.load_state_dict(saved["optimizer"])', "pass",
           "training/test_trainer.py killed_run_repeats"),
    Mutant("lra/training/trainer.py",
           'checkpoint.restore_random_states(saved["random"][distributed.rank()])', "pass",
           "training/test_trainer.py killed_run_repeats"),
    Mutant("lra/training/trainer.py",
           "if cfg.clip_norm is not None:", "if cfg.clip_norm:  # and never\n"
           "                pass\n            if False:", "training/test_trainer.py clip"),
    Mutant("lra/training/trainer.py",
           "test = evaluate_on(data.test)", "test = evaluate_on(data.val)",
           "training/test_trainer.py chosen_step"),
    Mutant("lra/training/evaluate.py", "model.eval()", "model.train(was_training)",
           "training/test_trainer.py evaluation_leaves"),
    Mutant("lra/training/evaluate.py", "accuracy=int(hits_N.sum()) / max(1, all_answers),",
           "accuracy=float(np.mean([h.float().mean() for h in hits])),",
           "training/test_trainer.py every_example_is_evaluated_once"),
    Mutant("lra/training/optim.py",
           "peak, last = cfg.warmup_steps - 1,", "peak, last = cfg.warmup_steps,",
           "training/test_optim.py one_cycle"),
    Mutant("lra/training/optim.py", "weight_decay=cfg.weight_decay", "weight_decay=0.01",
           "training/test_optim.py settings"),
    Mutant("lra/training/optim.py",
           'learning_rate(step, group_config(group.get("name", "general"), cfg))',
           "learning_rate(step, cfg)", "training/test_optim.py rates_and_decays"),
    Mutant("models/norm.py", "mask_N = mask_BL.reshape(-1).to(x_BLD.dtype)",
           "mask_N = torch.ones_like(mask_BL).reshape(-1).to(x_BLD.dtype)",
           "models/test_norm.py real_tokens_alone"),
    Mutant("models/norm.py", "norm.is_frozen = True", "norm.is_frozen = False",
           "models/test_norm.py computed_twice"),
    Mutant("models/recurrence.py", "carry_NS = -lag_SS, carry_NS.flip(1)",
           "carry_NS = -lag_SS, carry_NS", "models/test_recurrence.py equals_a_loop"),
    Mutant("models/mega.py", "scale = self.delta.shape[1] ** -0.5", "scale = 1.0",
           "models/test_mega.py naive"),
    Mutant("lra/training/checkpoint.py", "torch.manual_seed(seed)", "torch.manual_seed(0)",
           "test_job.py seed_decides"),
    Mutant("lra/training/checkpoint.py", "KEEP = 2", "KEEP = 1",
           "training/test_trainer.py two_states"),
    Mutant("lra/training/checkpoint.py", "weights_only=True", "weights_only=False",
           "training/test_trainer.py code_in_it"),
    Mutant("lra/files.py", "else:\n                os.replace(temporary, path)",
           "else:\n                path.write_bytes(temporary.read_bytes())",
           "tasks/test_data.py replaced_whole"),
    Mutant("lra/training/stopping.py",
           "stop.request(signal.Signals(number).name)",
           "stop.request(None)", "training/test_trainer.py signal_saves"),
    # What a run is and leaves behind: hardware, record, identity, logger, sweeps.
    Mutant("lra/training/hardware.py",
           "torch.set_num_threads(config.num_threads or DEFAULT_THREADS)",
           "torch.set_num_threads(config.num_threads or torch.get_num_threads())",
           "test_job.py job_before"),
    Mutant("lra/training/hardware.py", "torch.cuda.reset_peak_memory_stats()", "pass",
           "test_job.py job_before"),
    Mutant("lra/plan.py", "max_length=task.max_length,", "max_length=2000,",
           "test_job.py protocol"),
    Mutant("lra/plan.py", 'budget="reduced" if', 'budget="full" if', "test_job.py reduced_budget"),
    Mutant("lra/plan.py", "if 10 * params > 11 * baseline:", "if 10 * params > 12 * baseline:",
           "test_job.py ten_percent"),
    Mutant("lra/config.py", 'NO_NUMBERS = ("log_every",', 'NO_NUMBERS = ("lr", "log_every",',
           "test_config.py hash"),
    Mutant("lra/config.py", '"shape.norm_kind": "layer", ', "", "test_config.py came_later"),
    Mutant("lra/training/evaluate.py", "Z_99 = 2.326347874040841", "Z_99 = 1.6448536269514722",
           "results/test_records.py binomial_bound"),
    Mutant("lra/results/records.py", "np.packbits(correct_N)", "np.packbits(~correct_N)",
           "results/test_records.py packed"),
    Mutant("configs/config.yaml", "- logger: none", "- logger: tensorboard",
           "training/test_logger.py by_default"),
    Mutant("configs/config.yaml", "-${oc.env:LRA_SWEEP_ID,0}", "",
           "test_sweep.py folder_of_its_own"),
    Mutant("configs/config.yaml", "launch: ${now:%Y%m%d-%H%M%S-%f}", "launch: one",
           "test_sweep.py each_start"),
    Mutant("lra/multirun.py", "random.setstate(state)", "pass",
           "test_sweep.py whatever_the_syntax"),
    Mutant("run.py", "(earlier := same_as(launch, number, run_id))", "(earlier := None)",
           "test_sweep.py another_name"),
    Mutant("run.py", "return objective(outcome)", "return outcome.accuracy",
           "test_sweep.py optimises"),
    Mutant("run.py", "if found != ROOT / name:", "if False:", "test_cli.py another_place"),
    Mutant("lra/training/hardware.py", "self.stretches.pop()", "break",
           "training/test_trainer.py computed_otherwise"),
    Mutant("lra/plan.py", "if otherwise := computed_otherwise(record, hardware):", "if False:",
           "test_job.py computed_otherwise"),
    Mutant("lra/sweep.py",
           'return any(o.exit_code and o.status != "busy" for o in outcomes(folder))',
           "return False", "test_sweep.py outcomes_in_a_folder"),
    Mutant("lra/training/weights.py", "path = best if best.exists() else path", "pass",
           "test_job.py evaluate_only"),
    Mutant("lra/training/logger.py",
           "if step < self.writer.next_step:", "if step <= self.writer.next_step:",
           "training/test_logger.py tensorboard_events"),
    # The command line and several processes.
    Mutant("run.py", "exit_codes.append(outcome.exit_code)", "pass", "test_cli.py sigterm_saves"),
    Mutant("lra/cli.py", "sys.exit(max(exit_codes, default=0))", "sys.exit(exit_codes[-1])",
           "test_sweep.py recorded_at_once"),
    Mutant("lra/multirun.py", "os.chdir(job.runtime.cwd)", "pass", "test_cli.py relative_paths"),
    Mutant("lra/multirun.py", "            stop_jobs_with_sweep(launches[-1])", "            pass",
           "test_sweep.py saves_jobs_side_by_side"),
    Mutant("run.py", "if name := stopped_by(settings.launch):", "if name := '':",
           "test_sweep.py saves_jobs_side_by_side"),
    Mutant("lra/multirun.py", "fitting(settings, count) if may_lower else count", "count",
           "test_estimate.py fewer_jobs_run"),
    Mutant("lra/speed/forecast.py", "return most + of_a_row * (num_rows - many)",
           "return most * num_rows / many", "test_estimate.py counted_once"),
    Mutant("lra/runs.py", 'with files.locked(lock, "paths.outputs"):',
           "with contextlib.nullcontext():", "test_cli.py do_not_share"),
    Mutant("lra/training/stopping.py", "if before[signal.SIGHUP] == signal.SIG_IGN:", "if False:",
           "test_cli.py does_not_stop_what_ignores_it"),
    Mutant("lra/training/stopping.py",
           "- stop.signalled_at > PATIENCE_S:", "- stop.signalled_at >= 0:",
           "test_cli.py quick_succession"),
    Mutant("lra/training/gradient.py", "micro_loss * distributed.world_size()", "micro_loss",
           "training/test_distributed.py two_processes_equal"),
    Mutant("lra/training/trainer.py", "whole[rank::world]", "whole[0::world]",
           "training/test_distributed.py two_processes_equal"),
    Mutant("lra/training/gradient.py", "hardware.exchange(forward, i == num_parts - 1)",
           "hardware.exchange(forward, False)", "training/test_distributed.py two_processes_equal"),
    Mutant("lra/training/trainer.py",
           "random_states = distributed.gather(checkpoint.random_states())",
           "random_states = [checkpoint.random_states()] * distributed.world_size()",
           "training/test_distributed.py bit_for_bit"),
    Mutant("lra/job.py", "message, trace = distributed.first_failure(run_dir, message, trace)",
           "pass", "training/test_distributed.py error_in_one_process"),
    Mutant("scripts/make_tables.py", "return 1 if stale or skipped else 0", "return 0",
           "results/test_make_tables.py byte_for_byte"),
    Mutant("scripts/prepare_data.py", "exit_codes.append(main())", "main()",
           "tasks/test_data.py tells_of_failures"),
    # Numbers to tables.
    Mutant("lra/results/statistics.py", "math.sqrt(square / (n - 1))", "math.sqrt(square / n)",
           "results/test_compare.py sample_deviation"),
    Mutant("lra/results/statistics.py", "all(low > 0 or high < 0", "any(low > 0 or high < 0",
           "results/test_compare.py every_interval"),
    Mutant("lra/results/published.py", 'if text not in (FAIL, "NA"):', "if text not in (FAIL,):",
           "results/test_papers.py not_available"),
    Mutant("lra/results/leaderboard.py",
           "means[-1] = FAIL_AS", "pass", "results/test_leaderboard.py path_x_as_50"),
    Mutant("lra/results/leaderboard.py",
           "dropped.append(newest[key])\n        newest[key] = record",
           "dropped.append(record)\n        newest.setdefault(key, record)",
           "results/test_leaderboard.py newest_counts"),
    Mutant("lra/results/leaderboard.py", "for rule in self.rules)", "for rule in self.rules[-1:])",
           "results/test_leaderboard.py above_every_rule"),
    Mutant("lra/probes.py", "return floors if there == here", "return floors if there",
           "test_probes.py very_test_examples"),
    Mutant("models/sinkhorn.py", ".tolist() if p > 0 else", ".tolist() if p >= 0 else",
           "models/test_models.py draws_no_random"),
    Mutant("lra/training/hardware.py", "find_unused_parameters=not uses_all",
           "find_unused_parameters=False", "training/test_distributed.py stop_the_exchange"),
    Mutant("lra/results/leaderboard.py", "is_higher and p < 0.01", "is_higher and p < 0.05",
           "results/test_leaderboard.py above_every_rule"),
    Mutant("models/dropout.py", "1 if is_in_torch_dispatch_mode() else torch.get_num_threads()",
           "torch.get_num_threads()",
           "speed/test_inspect.py in_other_threads_count"),
    Mutant("lra/tasks/listops_levels.py", "len(opened) == level:", "len(opened) > level:",
           "tasks/test_listops_levels.py not_followed_is_asked"),
    Mutant("lra/tasks/listops_levels.py", "counts[depth, operator - MIN, value_K[0]] += 1",
           "counts[1, operator - MIN, value_K[0]] += 1", "tasks/test_listops_levels.py counted"),
    Mutant("lra/results/floors.py", "for rule in (*floors.floors, *floors.ladder)}",
           "for rule in (*floors.floors, *load(path).ladder)}", "results/test_floors.py ladder"),
    Mutant("lra/results/leaderboard.py", "share_N > 0.5", "share_N > 0.0",
           "results/test_leaderboard.py above_every_rule"),
    Mutant("lra/results/leaderboard.py", "z > 0 and self.mean >", "self.mean >= 0 * z + 0 *",
           "results/test_leaderboard.py above_every_rule"),
    Mutant("lra/results/leaderboard.py", '"d": any(r.dirty',
           '"d": all(r.dirty', "results/test_leaderboard.py any_run"),
    Mutant("lra/results/records.py", "correct_N.mean() - test.accuracy) > 1e-9",
           "correct_N.mean() - test.accuracy) > 1", "results/test_records.py contradict"),
    Mutant("lra/training/weights.py", 'source = Path(str(config.get("init_from") or source))',
           "pass", "test_job.py goes_on_from_weights"),
    Mutant("lra/tasks/listops.py", "num_seen) - start",
           "num_seen) - start - 1", "tasks/test_listops.py share_as_many"),
    Mutant("lra/tasks/checks.py", "if task.kind != \"files\":\n            return found",
           "return found", "tasks/test_data.py splits_are_copies"),
    Mutant("scripts/compare.py", "if len(fingerprints) > 1:", "if len(fingerprints) > 2:",
           "results/test_compare.py cannot_be_compared"),
    Mutant("scripts/records.py", "== path.read_bytes() for other in here", "for other in here",
           "results/test_records.py merge"),
    # Models: masks, scales, pooling.
    Mutant("models/layers.py", "attn_mask=mask_B11N, dropout_p", "attn_mask=None, dropout_p",
           "models/test_models.py softmax"),
    Mutant("models/layers.py", "mask_B11N = None if mask_BN is None else mask_BN[:, None, None, :]",
           "mask_B11N = None if mask_BN is None else mask_BN[:, None, None, :].to(q_BHLK.dtype)",
           "models/test_models.py softmax"),
    Mutant("models/layers.py", "dropout_p=dropout, is_causal=causal",
           "dropout_p=dropout, is_causal=causal, scale=0.5", "models/test_models.py softmax"),
    Mutant("models/layers.py", "mask_BN = mask_BN | ~mask_BN.any(dim=1, keepdim=True)", "pass",
           "models/test_models.py padding_is_finite"),
    Mutant("models/predictor.py", "PROBE_LENGTH + encoder.stride - 1)", "PROBE_LENGTH)",
           "models/test_predictor.py steps_over"),
    Mutant("models/performer.py", "return x.double() if self.in_float64 else widened(x)",
           "return widened(x)", "models/test_performer.py any_width"),
    Mutant("models/patterns.py", "plan.clear_open(dy)", "pass",
           "models/test_patterns.py naive_version_with"),
    Mutant("models/dropout.py", "torch.inference_mode(inference),", "torch.inference_mode(False),",
           "models/test_models.py several_threads"),
    Mutant("models/dropout.py", "width**-0.5, k_HNK", "0.5, k_HNK",
           "models/test_dropout.py formula"),
    Mutant("models/dropout.py", "score_HRJ.masked_fill_(self.hidden_BN[b, columns], -torch.inf)",
           "pass", "models/test_dropout.py formula"),
    Mutant("models/dropout.py", "ctx.scale = 1 / keep_probability(p)", "ctx.scale = 1.0",
           "models/test_dropout.py unbiased"),
    Mutant("models/encoder.py", "F.pad(mask_BL, (1, 0), value=True)",
           "torch.cat([mask_BL[:, :1], mask_BL], dim=1)", "models/test_models.py class_token"),
    Mutant("models/classifier.py", "mask_BSL = positions_L < lengths_BS[..., None]",
           "mask_BSL = (positions_L < lengths_BS[..., None]) & (tokens_BSL > 1)",
           "models/test_models.py black"),
    Mutant("models/classifier.py", "weight_BL.sum(dim=1, keepdim=True).clamp(min=1))",
           "mask_BL.shape[1])", "models/test_models.py neither_neighbours"),
    Mutant("models/classifier.py", "u_BD * v_BD, u_BD - v_BD", "u_BD * v_BD, v_BD - u_BD",
           "models/test_models.py two_sequences"),
    Mutant("models/luna.py", "return slots_M < mask_BL.sum(dim=1, keepdim=True)",
           "return slots_M <= mask_BL.sum(dim=1, keepdim=True)",
           "models/test_luna.py as_many_slots"),
    Mutant("models/nystromformer.py", "(mask_BL.cumsum(dim=1) * num_segments_B1 - 1)",
           "(mask_BL.cumsum(dim=1) * num_segments_B1)", "models/test_nystromformer.py segments"),
    Mutant("models/fastformer.py", "return weight_BHL.masked_fill(padding_B1L, 0.0)",
           "return weight_BHL", "models/test_fastformer.py row_of_padding_has"),
    Mutant("models/performer.py", "r_NKK.diagonal(dim1=1, dim2=2).sign()[:, None]", "1",
           "models/test_performer.py orthogonal_rows"),
    Mutant("models/performer.py", "x_BHL1.cummax(dim=2).values", "x_BHL1.amax(dim=2, keepdim=True)",
           "models/test_performer.py later_keys"),
    # Tasks: readers and generators.
    Mutant("lra/tasks/listops_files.py", "result = sum(args) % 10", "result = sum(args) % 9",
           "tasks/test_listops.py gives_the_value"),
    Mutant("lra/tasks/listops_files.py", "if label != value:", "if label > value:",
           "tasks/test_listops.py label"),
    Mutant("lra/tasks/listops_generator.py", "spawn_key=(number,)", "spawn_key=(0,)",
           "tasks/test_listops.py distribution"),
    Mutant("lra/tasks/sources.py", "held_N if split == \"val\" else ~held_N",
           "held_N if split == \"val\" else held_N >= 0", "tasks/test_text.py stratified_part"),
    Mutant("lra/tasks/sources.py", "if len(np.unique(held_N)) == 1:", "if False:",
           "tasks/test_text.py nothing_to_train_on"),
    Mutant("lra/tasks/sources.py", "if known_equal(", "if False and known_equal(",
           "tasks/test_sources.py compared_once"),
    Mutant("scripts/prepare_data.py", "failed = max(failed, 1)", "raise",
           "tasks/test_data.py stops_no_other_task"),
    Mutant("models/shape.py", "if not 2.0**-126 <= value <", "if not 0 < value <",
           "models/test_lru.py refused"),
    Mutant("lra/tasks/retrieval.py", "texts[0][:MAX_DOCUMENT_BYTES], texts[1]",
           "texts[1][:MAX_DOCUMENT_BYTES], texts[0]", "tasks/test_retrieval.py row"),
    Mutant("lra/tasks/image.py", "np.float32(0.2989), np.float32(0.5870)",
           "np.float32(0.2990), np.float32(0.5870)", "tasks/test_image.py grey"),
    Mutant("lra/tasks/pathfinder_files.py", "with _alone(level):", "if level:",
           "tasks/test_pathfinder.py leaves_the_first_alone"),
    Mutant("lra/tasks/pathfinder.py", '"val": order[held : 2 * held], "train": order[2 * held :]',
           '"val": order[:held], "train": order[2 * held :]', "tasks/test_pathfinder.py split"),
]  # fmt: skip


def run_tests(folder: Path, words: list[str]) -> int:
    """Exit code of pytest in the copy: 0 passed, 1 failed, others did not run, -9 took too long.

    In a fork, which has torch and the other libraries already, but nothing of the project.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        # Compiled files are told apart by second and size, in which a break may change nothing.
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
                       "HOME": str(folder.parent)}  # fmt: skip
        sys.path[0] = str(folder)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words])
        os._exit(int(code))
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # programs that a failed test has left
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(found[1])


def outcome(folder: Path, mutant: Mutant, passing: dict[str, int]) -> str:
    """How a break fares in the copy at `folder`; `passing` has the tests' codes without it."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"stale: its old text stands {text.count(mutant.old)} times in the file"
    if mutant.test not in passing:
        passing[mutant.test] = run_tests(folder, mutant.words)
    if passing[mutant.test]:
        return f"its tests do not pass without the break (code {passing[mutant.test]})"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = run_tests(folder, mutant.words)
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: "SURVIVED", 1: "caught"}.get(code, f"its tests did not run (code {code})")


def main() -> int:
    import hydra.main  # noqa: F401
    import torch._dynamo  # noqa: F401

    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if all(any(w in text for text in m) for w in words)]
    counts: dict[str, int] = {}
    passing: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name) / "repo"
        folder.mkdir()
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / part, ignore=ignored)
            else:
                shutil.copy2(source, folder / part)
        if (ROOT.parent / "shared").exists():
            (Path(name) / "shared").symlink_to((ROOT.parent / "shared").resolve())
        for mutant in chosen:
            started = time.monotonic()
            found = outcome(folder, mutant, passing)
            counts[found.partition(":")[0]] = counts.get(found.partition(":")[0], 0) + 1
            change = " ".join(mutant.new.split())
            print(f"{found:<9} {time.monotonic() - started:4.0f} s  {mutant.file}: {change}  "
                  f"[{mutant.test}]", flush=True)  # fmt: skip
    print(f"{len(chosen)} breaks: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.path.remove(str(ROOT / "tests"))  # which has a package `models` of its own
    sys.exit(main())
