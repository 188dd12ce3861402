#!/bin/bash
# GPT-3 of 175B parameters
GPUS_PER_NODE=8
NUM_NODES=1
DATA_PATH=$1

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # any
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
)
PARALLEL=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} \
    ${PARALLEL[@]} --data-path $DATA_PATH --split 949,50,1
