"""`tercet train`: set up a run, loop over its steps, and end it. Orchestration only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from tercet.atomic_io import write_json, write_text
from tercet.config.load import write_config
from tercet.config.schema import RunConfig
from tercet.data.loader import Batch, Loader, build_loader
from tercet.data.paths import save_file_lists
from tercet.data.stream import StoppedWaiting
from tercet.data.tokenizers import Tokenizer
from tercet.doctor.examine import examine_before_training
from tercet.errors import TercetError
from tercet.model.cost import parameters
from tercet.model.sampling import INVALID_TOKEN
from tercet.parallel.failure import PeerFailed
from tercet.parallel.launch import Launch
from tercet.parallel.strategy import Strategy
from tercet.telemetry import events
from tercet.telemetry.event_log import EventLog, rank_files, read_events, rewind
from tercet.telemetry.hardware import peak_flops
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import summarise
from tercet.telemetry.watchdog import Watchdog
from tercet.terminal import plural
from tercet.train import console
from tercet.train.checkpoint import Checkpointer
from tercet.train.cuda_graph import StepGraph
from tercet.train.device import device_name, environment, peak_memory_gib, pick_device, set_arithmetic
from tercet.train.hooks import AsyncSaver, StopSignals, attach, join_run, rank_context
from tercet.train.manifest import describe_newest, run_of
from tercet.train.optim import learning_rate, muon_learning_rate
from tercet.train.resume import (
    abandon_later,
    check_initial_tokenizer,
    check_requirements,
    find_start,
    load_run_tokenizer,
    tokenizer_files,
)
from tercet.train.run_folder import ENVIRONMENT, FILE_LISTS, RunFolder
from tercet.train.state import Stages, TrainState, build_state, set_teacher, step_flops
from tercet.train.step import StepBatches, to_device, train_step
from tercet.train.validate import Validation, check_validation_data, sample_text

SAMPLE_SECONDS = 30.0  # a text sample is cut after this time: on a slow machine, all its tokens may take minutes


def train(config: RunConfig, *, origins: Mapping[str, str] | None = None, resume: str | None = None) -> int:
    """Train until the last step, a signal, or the end of the data. Returns the exit code of the process."""
    origins = origins or {}
    set_arithmetic(deterministic=config.run.deterministic, threads=config.run.threads)
    launch = Launch.from_environment()
    device = pick_device(config.run.device, launch.local_rank, share=config.parallel.share_gpus)
    strategy, path, resume = join_run(config, resume, launch, device)
    config = config.with_absolute_paths()
    screen = Screen(quiet=strategy.rank > 0)
    with rank_context(strategy), ExitStack() as stack:
        stop = stack.enter_context(StopSignals(watch_parent=launch.by_torchrun))
        folder = stack.enter_context(closing(RunFolder(path, lock=strategy.rank == 0)))

        # Check everything, build the model, and open the data.
        start, messages = strategy.on_rank_0(lambda: find_start(config, resume, folder))
        tokenizer = load_run_tokenizer(config, start)
        if start is None:
            messages += strategy.on_rank_0(lambda: check_initial_tokenizer(config, tokenizer))
        strategy.on_rank_0(lambda: check_requirements(config, tokenizer))
        doctor_report = strategy.on_rank_0(lambda: examine_before_training(config, folder.path))
        strategy.on_rank_0(lambda: console.check_memory(config, device))
        with console.memory_errors(config, device):
            state = build_state(config, device, strategy, start)

        file_lists = (run_of(start.path) if start else folder.path) / FILE_LISTS

        def open_loader(stage: RunConfig, steps: int | None) -> Loader:
            """steps: those left in the stage, if the run has stages."""
            limit = None if steps is None else steps * (stage.train.tokens_per_step // stage.data.seq_len)
            loader = build_loader(
                stage.data, seed=stage.run.seed, batch_sequences=stage.train.micro_batch * strategy.data_ranks,
                rank=strategy.data_rank, world_size=strategy.data_ranks, state=state.cursor, file_lists=file_lists,
                tokenizer=tokenizer, stop=lambda: stop.signal is not None, limit=limit,
            )  # fmt: skip
            return stack.enter_context(loader)

        stages = Stages(config, state, open_loader)
        loader = stages.loader
        strategy.check_same_data(loader.stream.identity)
        strategy.on_rank_0(lambda: check_validation_data(config, tokenizer))

        # All checks have passed: from here on the run folder may change.
        messages += strategy.on_rank_0(lambda: abandon_later(start, folder))
        messages += [f"the data changed since the checkpoint: {change}" for change in loader.changes]
        forked = start is not None and not start.is_in(folder.checkpoints)
        # A run without a step left keeps the description of the steps that it ran.
        if strategy.rank == 0 and (start is None or forked or state.step < config.train.steps):
            # what is needed to repeat the run; each file is replaced atomically
            write_json(folder.path / ENVIRONMENT, environment(device, device_name(device)))
            write_config(config, origins, folder.path)
            for name, text in tokenizer_files(tokenizer).items():
                write_text(folder.path / name, text)
            save_file_lists(folder.path / FILE_LISTS, loader.stream.notes.files)
        superseded, damaged = rewind(folder.path, strategy.rank, state.step)
        if strategy.rank == 0:  # ranks that this launch does not have
            for rank in (r for r in rank_files(folder.path, "events") if r >= strategy.world_size):
                rewind(folder.path, rank, state.step)
        log = stack.enter_context(closing(EventLog(folder.path, strategy.rank)))
        beat = stack.enter_context(
            Watchdog(folder.path, strategy.rank, config.health, log, config.log.heartbeat_seconds)
        )
        if forked or state.step < config.train.steps:
            screen.header(console.header_lines(config, state, device, strategy, folder.path, tokenizer.vocab_size))
            for line in console.config_lines(config, origins, folder.path):
                screen.say(line, "dim")
        for message in (*messages, *console.no_effect_lines(config, origins)):
            screen.say(message)

        # Attach readers to the log, and log the start.
        strategy.publish_status(lambda: (beat.step, beat.doing))
        past = strategy.on_rank_0(lambda: list(read_events(log.path)))
        observer = attach(stack, config, state, strategy, folder.path, log, beat, screen, past)
        trainer = Trainer(
            config, state, strategy, stages, tokenizer, folder, log, beat, screen, stop, past, observer, forked
        )
        started = events.RunStarted(
            step=state.step, name=config.run.name, steps=config.train.steps, world_size=strategy.world_size,
            strategy=strategy.name, device=device_name(device), parameters=parameters(config.model).total,
            tokens_per_step=config.train.tokens_per_step, accumulation=stages.config.accumulation,
            resumed_from=str(start.path.resolve()) if start else None, superseded=superseded,
        )  # fmt: skip
        log.emit(started)
        notes = list(loader.stream.notes.held_out) if start is None else []
        if damaged:  # numbers of lines that earlier processes wrote
            lines = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
            notes.append(f"warning: {log.path} has damaged lines, which were ignored: line {lines}")
        elif strategy.rank == 0 and start is not None and not forked and not past:
            lost = f"events of steps 1 to {state.step} are lost, and training.csv and the report lack them"
            notes.append(f"warning: {log.path} was deleted or emptied: {lost}")
        for text in notes:
            log.emit(events.Noted(step=state.step, text=text))
        if doctor_report is not None:
            log.emit(replace(doctor_report, step=state.step, time=time.time()))  # in the order of the log
        return trainer.run()


class Halted(TercetError):
    """Too many steps were not finite, or a health rule halted the run."""


@dataclass
class Trainer:
    """One process of a run, once everything is set up."""

    config: RunConfig
    state: TrainState
    strategy: Strategy
    stages: Stages
    tokenizer: Tokenizer
    folder: RunFolder
    log: EventLog
    beat: Watchdog
    screen: Screen
    stop: StopSignals
    past: list[events.Event]  # events of earlier processes of this run
    observer: Observer
    forked: bool  # started from another run's checkpoint, which this folder has no copy of
    _first_step_reported: bool = False
    _io_retries: int = 0  # logged so far
    _data_seconds: float = 0.0  # waited for data up to the last log line

    def __post_init__(self) -> None:
        config = self.config
        self.batches = StepBatches(self.loader, self.stage.accumulation, self.state.cursor)
        self.validation = Validation(self.stage, self.strategy, self.tokenizer)
        checkpointer = Checkpointer(
            self.folder.checkpoints, config.checkpoint, self.strategy.rank, self.strategy.world_size,
            self.strategy.checkpoint_group, self.strategy.wait_for, tokenizer_files(self.tokenizer),
            keep_steps=config.train.stage_ends,
        )  # fmt: skip
        saved_config = config.model_dump(mode="json")
        self.saver = AsyncSaver(checkpointer, self.state, saved_config, self.log, self.observer)
        name = device_name(self.state.device)
        self._peak = peak_flops(name) if console.precision_of(config, self.state.device) == "bf16" else None
        self._logged = {(e.kind, e.step) for e in self.past}
        self._start = console.Start(time.time(), self.state.step, self.state.tokens)

    @property
    def stage(self) -> RunConfig:
        """The configuration of the current stage: its lengths and batch sizes are those of the running steps."""
        return self.stages.config

    @property
    def loader(self) -> Loader:
        return self.stages.loader

    def run(self) -> int:
        """Run all remaining steps and end the run properly, whatever happens. Returns the exit code."""
        try:
            self.screen.begin(self.state.step, self.config.train.steps)
            with console.memory_errors(self.config, self.state.device, lambda: self.state.step):
                outcome, reason, code = self._run_steps()
                self._finish(outcome, reason)
        except BaseException as error:
            self.screen.end()
            outcome = "halted" if isinstance(error, Halted) else "failed"
            if self.strategy.world_size == 1:  # with several ranks, it might wait for one that is gone
                self.saver.save_after_error(self.screen, between_steps=False)
            cause = self.strategy.explain(error)
            self._log_end(outcome, f"{type(cause).__name__}: {cause}")
            if cause is not error:
                raise cause from error
            if isinstance(error, OSError):
                raise TercetError(console.disk_error(error, self.folder, self.config.parallel.world_size)) from error
            raise
        return code

    def _run_steps(self) -> tuple[str, str, int]:
        """Returns (outcome, reason, exit code)."""
        state, steps = self.state, self.config.train.steps
        self._announce_stage()
        state.interval.start_clock()
        if self.forked:
            self._save()  # so that this folder can be resumed without the other run
        elif 0 < state.step < steps and _due(state.step, self.config.train.val_every):
            self._validate()  # only if it was interrupted: what is logged is not repeated
        while state.step < steps:
            batches, error = self._next_batches()
            self.beat.at(state.step + 1, "waiting for other ranks")
            # All ranks are between two steps here, so they can save together.
            if self.strategy.any_rank(self.stop.signal is not None or error is not None):
                if not self.strategy.any_rank(error is not None):
                    reason, number = self.stop.reason or "a signal on another rank", self.stop.signal or 15
                    return "interrupted", reason, 128 + number
                self.saver.save_after_error(self.screen, between_steps=True)
                raise error or PeerFailed("another rank could not read its data", reported_elsewhere=True)
            if not batches:
                return "completed", "the data ended", 0
            self._step(batches)
            self._after_step()
        return "completed", "all steps done", 0

    def _next_batches(self) -> tuple[list[Batch], Exception | None]:
        """The batches of the next step, or why there are none; neither after a signal."""
        if self.stop.signal is not None:
            return [], None
        self.beat.at(self.state.step + 1, "waiting for data")
        try:
            if self.stages.is_over:
                self._start_stage()
            return self.batches.next_step(), None
        except StoppedWaiting:
            return [], None
        except Exception as error:
            return [], error
        finally:
            self._log_io_retries()

    def _start_stage(self) -> None:
        """Continue with the next stage, in the state in which a resumed run would start it."""
        with self.state.interval.excluded():
            self.stages.advance()
        self.batches.continue_with(self.loader, self.stage.accumulation)
        self.validation = Validation(self.stage, self.strategy, self.tokenizer)
        self._io_retries, self._data_seconds, self._first_step_reported = 0, 0.0, False
        self._announce_stage()

    def _announce_stage(self) -> None:
        if (event := self.stages.event()) is not None:
            self.log.emit(event)

    def _log_io_retries(self) -> None:
        messages = self.loader.stream.notes.io_retries[self._io_retries :]
        for message in messages:
            self.log.emit(events.Noted(step=self.state.step, text=f"warning: {message}"))
        self._io_retries += len(messages)

    def _step(self, batches: list[Batch]) -> None:
        state, config = self.state, self.config.train
        step = state.step + 1
        self.beat.at(step, "training")
        self.observer.before_step(step)
        if config.selector.teacher != "all":
            set_teacher(state.model, config.selector, step)
        result = train_step(
            state.model,
            state.optimizer,
            [to_device(batch, state.device, self.strategy) for batch in batches],
            step=step,
            lr=learning_rate(config, step),
            clip=config.clip,
            precision=config.precision,
            guard=state.guard,
            strategy=self.strategy,
            phase=self.observer.phase,
            executor=state.graph if step >= config.selector.all_until else None,  # a graph holds one teacher
            progress=self.screen.micro_batch,
        )
        self.observer.after_step(step)
        state.step = step
        state.tokens += sum(b.tokens.numel() for b in batches) * self.strategy.data_ranks
        state.cursor = self.batches.cursor
        state.interval.add(step, result)
        self.screen.advance(step)
        if state.graph is not None:
            self._log_graph(state.graph)

    def _log_graph(self, graph: StepGraph) -> None:
        """Log what was captured in this step, or why it runs eagerly from now on."""
        for event in graph.take_events(self.state.step):
            self.log.emit(event)
            if isinstance(event, events.GraphCaptureFailed) and (halting := self.observer.halting):
                raise Halted(f"stopped by health.halt=fallback after step {event.step}: {halting[-1].sentence}")

    def _after_step(self) -> None:
        """Log, validate, sample and save if due. The save comes last, so that the log has everything it contains."""
        config, step = self.config, self.state.step
        if self.state.interval.steps_timed == 1 and not self._first_step_reported:
            self._report_first_step()
        stage_ends = self.stages.is_over
        if step % config.log.every == 0 or stage_ends:
            self._log()
        if step == config.train.steps:
            return  # `_finish` does the rest
        try:
            if _due(step, config.train.val_every) or stage_ends:
                self._validate()
            if _due(step, config.train.sample_every):
                self._sample()
        except Exception:
            if self.strategy.world_size == 1:  # other ranks may not take part in a save
                self.saver.save_after_error(self.screen, between_steps=True)
            raise
        self.saver.collect(wait=False)
        if _due(step, config.checkpoint.every) or stage_ends:
            self._save()

    def _report_first_step(self) -> None:
        """Report the first step before the first log line is due. Waits for the device, for this one step only."""
        self._first_step_reported = True
        loss = self.state.interval.read()[-1].loss
        seconds = self.state.interval.seconds_per_step()
        self.screen.warming_up = True  # until this interval is logged: most of this step may be compilation
        self.screen.say(f"first step after {seconds:.2f} s: loss {loss:.4f}")
        self.strategy.shorten_timeouts()

    def _log(self) -> None:
        """Read the interval's values from the device and log them."""
        state, config = self.state, self.config
        measured = state.interval.read()
        seconds = state.interval.seconds_per_step()
        if not state.interval.steps_timed:  # all its steps were timed by the process before this one
            seconds = next((e.step_seconds for e in reversed(self.past) if isinstance(e, events.StepLogged)), seconds)
        timed = max(1, state.interval.steps_timed)
        data_seconds = self.loader.wait_seconds
        # None if the device's peak is unknown
        mfu = step_flops(self.stage) / seconds / (self._peak * self.strategy.world_size) if self._peak else None
        state.interval.clear()  # the time that logging takes belongs to the next interval
        skipped = [m.step for m in measured if m.nonfinite]
        if skipped:
            self.log.emit(events.StepsSkipped(step=state.step, steps=skipped, total=state.guard.total()))
            if halted := state.guard.halted_at():
                self._halt(halted)
        lr = learning_rate(config.train, state.step)
        logged = events.StepLogged(
            step=state.step, loss=measured[-1].loss, lr=lr, muon_lr=muon_learning_rate(state.optimizer, lr),
            grad_norm=measured[-1].grad_norm, tokens=state.tokens,
            tokens_per_s=self.stage.train.tokens_per_step / seconds, step_seconds=seconds,
            data_seconds=(data_seconds - self._data_seconds) / timed, mfu=mfu,
            memory_gib=peak_memory_gib(state.device, state.held_bytes), skipped=state.guard.total(),
            epoch=self.batches.stats.epoch, bad_records=self.batches.stats.skipped, first_step=measured[0].step,
            losses=[m.loss for m in measured], grad_norms=[m.grad_norm for m in measured],
        )  # fmt: skip
        self.log.emit(logged)
        self.screen.warming_up = False
        self.observer.after_log(logged, self.batches.stats)
        self._data_seconds = data_seconds
        halting = self.observer.halting
        if self.strategy.any_rank(bool(halting)):
            finding = halting[0].sentence if halting else "see the other ranks' events"
            rule = f"health.halt={halting[0].rule}" if halting else "a health rule on another rank"
            raise Halted(f"stopped by {rule} after step {state.step}: {finding}")

    def _halt(self, step: int) -> None:
        """Stop. The weights have been frozen since `step`."""
        guard = self.state.guard
        raise Halted(
            f"stopped: losses or gradients were not finite in {plural(guard.total(), 'step')} of the run "
            f"(train.max_skipped={guard.max_total}), {guard.in_row()} of them in a row up to step {step} "
            f"(at most {guard.max_in_row}); {describe_newest(self.folder.checkpoints)}; a lower "
            "train.lr may help (on a resume with --checkpoint.allow_config_change)"
        )

    def _validate(self) -> None:
        step = self.state.step
        if not self.config.train.val_tokens or ("validation", step) in self._logged:
            return
        self._validating()
        start = time.perf_counter()
        with self.state.interval.excluded():
            found = self.validation.loss(self.state.model, self.state.device, self._validating, self._stops_validation)
            if found is None:
                return
            size = self.validation.text_bytes(self.state.device)
        seconds = time.perf_counter() - start
        loss, tokens = found
        length = self.stage.data.seq_len if self.config.train.stages else None
        self.log.emit(
            events.Validated(step=step, loss=loss, tokens=tokens, seconds=seconds, bytes=size, seq_len=length)
        )
        self._logged.add(("validation", step))

    def _stops_validation(self) -> bool:
        """Whether a signal ends the validation, which the resumed run repeats. At the end of a stage it is completed,
        because a run resumed there begins with the next stage."""
        return not self.stages.is_over and self.strategy.any_rank(self.stop.signal is not None)

    def _validating(self, batch: int = 0) -> None:
        """Show progress and update the heartbeat before each batch; 0 while batches are read."""
        self.beat.at(self.state.step, "validating")
        part = f" {batch}/{self.stage.validation_passes}" if batch else ""
        self.screen.doing(f"validating{part} …")

    def _sample(self) -> None:
        config = self.config.train
        if not config.sample_tokens or ("sample", self.state.step) in self._logged:
            return
        self.beat.at(self.state.step, "sampling")
        asked, chosen, started = config.sample_tokens, 0, time.monotonic()
        self.screen.doing(f"sampling up to {asked} tokens …", announce=True)

        def agree(choose: Callable[[], int]) -> int:
            """Rank 0's choice; ends the sample when its time is up, or at a signal."""
            nonlocal chosen
            chosen += 1
            self.beat.at(self.state.step, "sampling")
            over = self.stop.signal is not None or time.monotonic() - started > SAMPLE_SECONDS
            return self.strategy.on_rank_0(lambda: INVALID_TOKEN if over else choose())

        single_cpu = self.strategy.world_size == 1 and self.state.device.type == "cpu"
        with self.state.interval.excluded():
            text = sample_text(
                self.state.model, self.tokenizer, self.config.sample_prompt, asked, temperature=0.7,
                context=self.stage.data.seq_len, device=self.state.device, precision=config.precision,
                seed=self.config.run.seed, agree=agree,
                cached=single_cpu and console.precision_of(self.config, self.state.device) == "fp32",
            )  # fmt: skip
        if self.strategy.any_rank(self.stop.signal is not None):
            self.screen.say("the sample was interrupted: --resume auto repeats it")
            return
        if time.monotonic() - started > SAMPLE_SECONDS and chosen <= asked:
            self.screen.say(f"the sample was cut after {SAMPLE_SECONDS:.0f} s: {chosen - 1} of {asked} tokens")
        self.log.emit(events.Sampled(step=self.state.step, prompt=self.config.sample_prompt, text=text))
        self._logged.add(("sample", self.state.step))

    def _save(self) -> None:
        """Start saving the current step."""
        self.beat.at(self.state.step, "saving")
        if self.state.guard.halted_at():
            self._log()  # raises: steps since the weights froze are not progress
        self.saver.save()

    def _finish(self, outcome: str, reason: str) -> None:
        """Save, validate, sample, print the summary. The save comes first: a resumed run makes up for a missing
        validation or sample."""
        state, completed = self.state, outcome == "completed"
        if completed and state.interval.read():
            self._log()
        if not self.saver.up_to_date:
            self._save()
        self.saver.finish()
        if completed:
            self._validate()
            self._sample()
        self.screen.end()
        self._log_end(outcome, reason)
        if self.strategy.rank == 0:
            console.print_summary(
                self.screen, self.config, self.folder, state, self._start, completed=completed, reason=reason,
                bad_records=self.batches.stats.skipped, bad_examples=self.loader.stream.notes.bad_records,
            )  # fmt: skip

    def _log_end(self, outcome: str, reason: str) -> None:
        """Log the end of the run. A full disk must not hide the error that ended it."""
        self.beat.at(self.state.step, "ended")
        try:
            self.observer.flush_routes(self.state.step)
            seconds = time.time() - self._start.time
            self.log.emit(events.RunEnded(step=self.state.step, outcome=outcome, reason=reason, seconds=seconds))
            if self.strategy.rank == 0:
                write_json(self.folder.path / console.METRICS, summarise(read_events(self.log.path)))
        except OSError as error:
            self.screen.say(f"warning: the end of the run could not be logged ({error})", "bold red")
        if self.log.waiting:
            lost = f"{self.log.waiting} events could not be written to {self.log.path}: no space left"
            self.screen.say(f"warning: {lost}", "bold red")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
