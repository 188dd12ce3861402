#!/bin/bash
# Llama 3 8B on one node of eight
GPUS_PER_NODE=8
TP_SIZE=1
CP_SIZE=1
NUM_LAYERS=32
DTYPE="fp8"
SEQ_LENGTH=${SEQ_LENGTH:-8192}
LAUNCH="--nproc_per_node $GPUS_PER_NODE --nnodes 1 --node_rank 0"
MODEL=(
    --use-mcore-models
    --num-layers $NUM_LAYERS
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr 0.00015
    --clip-grad 1.0
    --bf16
    --grad-reduce-in-bf16
    --calculate-per-token-loss
)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
PARALLEL=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [[ "$1" == "MOCK" ]]; then
    DATA=("--mock-data" "--vocab-size 128256")
else
    DATA=("--data-path $1" "--vocab-size 128256")
fi
torchrun $LAUNCH pretrain_gpt.py ${MODEL[@]} ${TRAINING[@]} ${PARALLEL[@]} ${DATA[@]}
