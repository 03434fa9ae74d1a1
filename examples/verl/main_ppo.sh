#!/usr/bin/env bash
# verl's real trainer on a CPU: v1 separate_async, GRPO, the tiny model of tiny.py. main_ppo.sh FOLDER [OVERRIDE...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:?usage: main_ppo.sh FOLDER [OVERRIDE...]}"
shift
export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_LOGGING_LEVEL=WARN
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HYDRA_FULL_ERROR=1
export WANDB_MODE=disabled RAY_AUTH_MODE=disabled
cd "$folder"
exec python -m verl.trainer.main_ppo \
  trainer.use_v1=True trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.num_warmup_batches=1 \
  trainer.v1.separate_async.parameter_sync_step=1 trainer.v1.sampler.max_off_policy_threshold=8 \
  transfer_queue.enable=True data.train_files="$folder/train.parquet" data.val_files="$folder/train.parquet" \
  data.prompt_key=prompt data.truncation=left data.filter_overlong_prompts=False data.return_raw_chat=True \
  data.max_prompt_length=16 data.max_response_length=8 data.train_batch_size=2 data.gen_batch_size=1 \
  data.dataloader_num_workers=0 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  algorithm.rollout_correction.bypass_mode=False actor_rollout_ref.hybrid_engine=False \
  actor_rollout_ref.model.path="$folder/tiny" actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  +actor_rollout_ref.model.override_config.attn_implementation=eager actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_dynamic_bsz=False \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=hfcpu actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.nnodes=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.agent.num_workers=1 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16 reward.num_workers=1 \
  reward.custom_reward_function.path="$here/tiny.py" reward.custom_reward_function.name=compute_score \
  trainer.device=cpu trainer.logger='["console"]' trainer.project_name=x trainer.experiment_name=y \
  trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable trainer.nnodes=1 \
  trainer.n_gpus_per_node=1 trainer.total_epochs=1 trainer.total_training_steps=4 ray_kwargs.ray_init.num_cpus=16 \
  +ray_kwargs.ray_init.num_gpus=8 +ray_kwargs.ray_init.include_dashboard=False "$@"
